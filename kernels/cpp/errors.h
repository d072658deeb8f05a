// What is wrong with a caller's data, as an exception with a line of text.
#pragma once
#include <cstdio>
#include <stdexcept>

namespace qd {

template <class... Values> [[noreturn]] void fail(const char* format, Values... values) {
    char text[256];
    std::snprintf(text, sizeof text, format, values...);
    throw std::invalid_argument(text);
}

template <class... Values> void require(bool holds, const char* format, Values... values) {
    if (!holds) fail(format, values...);
}

}  // namespace qd
