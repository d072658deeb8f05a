# One library per instruction set from the same sources: kernels/cpp/*.cpp. Which one is loaded is
# decided at run time (kernels/qdeploy_kernels/cpu/library.py, whose table of CPU flags goes with
# the options here).
include(CheckCXXSourceCompiles)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(kernel_folder "${CMAKE_CURRENT_SOURCE_DIR}/kernels/cpp")
file(GLOB kernel_sources CONFIGURE_DEPENDS "${kernel_folder}/*.cpp")

set(flags_avx512 -march=x86-64-v4 -mavx512vnni -mavx512bf16)
set(flags_avx2 -mavx2 -mfma -mf16c)
set(flags_portable)
# What proves that compiler and assembler know the instruction set.
set(probe_avx512 "#include <immintrin.h>
  int main(int n, char**) {
    __m512i i = _mm512_dpbusd_epi32(_mm512_set1_epi32(n), _mm512_set1_epi8(1), _mm512_set1_epi8(2));
    __m512 f = _mm512_cvtepi32_ps(i);
    f = _mm512_dpbf16_ps(f, _mm512_cvtne2ps_pbh(f, f), _mm512_cvtne2ps_pbh(f, f));
    return (int)_mm512_reduce_add_ps(f);
  }")
set(probe_avx2 "#include <immintrin.h>
  int main(int n, char**) {
    __m256 f = _mm256_cvtph_ps(_mm_set1_epi16((short)n));
    f = _mm256_fmadd_ps(f, f, _mm256_cvtepi32_ps(_mm256_madd_epi16(
        _mm256_set1_epi16(1), _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_set1_epi8(2)))));
    return (int)_mm256_cvtss_f32(f);
  }")
set(probe_portable "#include <thread>\nint main() { std::thread([] {}).join(); }")

set(isas portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(isas avx512 avx2 portable)
endif()
foreach(isa IN LISTS isas)
  list(JOIN flags_${isa} " " CMAKE_REQUIRED_FLAGS)
  string(APPEND CMAKE_REQUIRED_FLAGS " -pthread")
  check_cxx_source_compiles("${probe_${isa}}" QDEPLOY_HAS_${isa})
  if(QDEPLOY_HAS_${isa})
    list(APPEND kernel_isas ${isa})
  elseif(QDEPLOY_REQUIRE_KERNELS)
    message(FATAL_ERROR "CPU kernels: ${CMAKE_CXX_COMPILER} can't compile for ${isa}")
  else()
    message(WARNING "CPU kernels: ${CMAKE_CXX_COMPILER} can't compile for ${isa}; left out")
  endif()
endforeach()
unset(CMAKE_REQUIRED_FLAGS)

# A library of our own runtime can't clash with the libstdc++ that torch brings.
set(CMAKE_REQUIRED_LINK_OPTIONS -static-libgcc -static-libstdc++ -Wl,--exclude-libs,ALL)
check_cxx_source_compiles("${probe_portable}" QDEPLOY_HAS_STATIC_RUNTIME)
if(QDEPLOY_HAS_STATIC_RUNTIME)
  set(runtime_options ${CMAKE_REQUIRED_LINK_OPTIONS})
endif()
unset(CMAKE_REQUIRED_LINK_OPTIONS)

# No -ffast-math and no contraction: results must be the same bits in every batch and chunking.
function(qdeploy_kernel_options target isa)
  string(TOUPPER ${isa} name)
  target_include_directories(${target} PRIVATE "${kernel_folder}")
  target_compile_definitions(${target} PRIVATE QD_ISA_${name}=1)
  target_compile_options(${target} PRIVATE -O3 -ffp-contract=off -fno-math-errno
    -fvisibility=hidden -fvisibility-inlines-hidden -pthread -Wall -Wextra ${flags_${isa}})
  target_link_options(${target} PRIVATE -pthread)
endfunction()

# An editable install reads the checkout in place, so its libraries go there, too.
set(destination "\${CMAKE_INSTALL_PREFIX}/qdeploy_kernels/cpu")
if(SKBUILD_STATE STREQUAL "editable")
  set(destination "${CMAKE_CURRENT_SOURCE_DIR}/kernels/qdeploy_kernels/cpu")
endif()
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)

# Built when installed, one by one, and not with `all`: one that fails drops only itself.
foreach(isa IN LISTS kernel_isas)
  set(library _qdeploy_cpu_${isa})
  add_library(${library} MODULE EXCLUDE_FROM_ALL ${kernel_sources})
  set_target_properties(${library} PROPERTIES PREFIX "" SUFFIX ".so" LIBRARY_OUTPUT_DIRECTORY
    "${CMAKE_CURRENT_BINARY_DIR}/lib")
  qdeploy_kernel_options(${library} ${isa})
  target_link_options(${library} PRIVATE -Wl,-z,defs ${runtime_options})
  install(CODE "
    file(REMOVE \"${destination}/${library}.so\")
    execute_process(RESULT_VARIABLE failed COMMAND \"${CMAKE_COMMAND}\" --build
      \"${CMAKE_CURRENT_BINARY_DIR}\" --target ${library} --parallel ${cores})
    if(NOT failed)
      file(INSTALL \"${CMAKE_CURRENT_BINARY_DIR}/lib/${library}.so\" DESTINATION \"${destination}\")
    elseif(${QDEPLOY_REQUIRE_KERNELS})
      message(FATAL_ERROR \"CPU kernels for ${isa} can't be built\")
    else()
      message(WARNING \"CPU kernels for ${isa} can't be built; left out\")
    endif()")
endforeach()

if(QDEPLOY_STRESS)
  foreach(isa IN LISTS kernel_isas)
    add_executable(stress_${isa} ${kernel_sources} "${kernel_folder}/tests/stress.cpp")
    qdeploy_kernel_options(stress_${isa} ${isa})
    # Phases start anew every few steps, not after weeks.
    target_compile_definitions(stress_${isa} PRIVATE QD_LAST_PHASE=2000)
    if(QDEPLOY_SANITIZE)
      set(sanitize -fsanitize=${QDEPLOY_SANITIZE} -fno-sanitize-recover=all)
      target_compile_options(stress_${isa} PRIVATE -O1 -g -fno-omit-frame-pointer ${sanitize})
      target_link_options(stress_${isa} PRIVATE ${sanitize})
    endif()
  endforeach()
endif()
