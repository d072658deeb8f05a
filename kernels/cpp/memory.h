// Zeroed memory in huge pages where the system has them.
#pragma once
#include <cstdint>
#include <utility>

namespace qd {

class Memory {
public:
    Memory() = default;
    explicit Memory(int64_t bytes);  // throws std::bad_alloc
    ~Memory() { release(); }
    Memory(Memory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr, other.bytes_ = 0; }
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
        return *this;
    }
    uint8_t* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    template <class T> T* as() const { return (T*)data_; }

private:
    void release();
    uint8_t* data_ = nullptr;
    int64_t bytes_ = 0;
};

}  // namespace qd
