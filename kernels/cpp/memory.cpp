#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace qd {

namespace {
constexpr int64_t HUGE_PAGE = 2 << 20;
}

Memory::Memory(int64_t bytes) : bytes_(bytes) {
    if (bytes <= 0) return;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        bytes_ = 0;
        throw std::bad_alloc();
    }
    data_ = (uint8_t*)p;
#ifdef MADV_HUGEPAGE
    if (bytes >= HUGE_PAGE) madvise(p, bytes, MADV_HUGEPAGE);
#endif
}

void Memory::release() {
    if (data_) munmap(data_, bytes_);
}

}  // namespace qd
