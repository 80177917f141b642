// Instructions of the running CPU, by the names of TARGETS in setup.py. Used by dispatch.cc, and by setup.py, which asks it for
// the rows that this machine can run before anything is compiled.
#pragma once

#include <sys/auxv.h>
#include <sys/prctl.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstring>
#include <string>

namespace fm::cpu {

#if defined(__x86_64__)
// CPUID leaf 7, register EDX.
inline bool has_amx(unsigned bit) {
  unsigned a, b, c, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> bit & 1);
}

// CPUID leaf 7, subleaf 1, register EAX. Not every compiler's __builtin_cpu_supports knows the name.
inline bool has_avx_vnni() {
  constexpr unsigned AVX_VNNI_BIT = 4;
  unsigned a = 0, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> AVX_VNNI_BIT & 1);
}

// Tiles are a state that the system must save (XCR0 bits 17 and 18) and whose use a process must ask for, once for all its threads.
// Why it may not use them; empty when it may.
inline std::string ask_for_tiles() {
  constexpr unsigned OSXSAVE_BIT = 27, TILE_STATES = 3u << 17;
  constexpr long ARCH_REQ_XCOMP_PERM_CODE = 0x1023, XFEATURE_XTILEDATA_NUMBER = 18;
  unsigned a, b, c = 0, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> OSXSAVE_BIT & 1))
    return "it does not save extended registers";
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & TILE_STATES) != TILE_STATES) return "it does not save tiles (XCR0)";
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM_CODE, XFEATURE_XTILEDATA_NUMBER) == 0) return "";
  return std::string("arch_prctl(ARCH_REQ_XCOMP_PERM): ") + std::strerror(errno);
}
inline const std::string& tiles_refused() {
  static const std::string reason = ask_for_tiles();
  return reason;
}

inline bool has_feature(const std::string& feature, int) {
  if (feature == "amx_tile") return has_amx(24);
  if (feature == "amx_bf16") return has_amx(22);
  if (feature == "amx_int8") return has_amx(25);
  if (feature == "avxvnni") return has_avx_vnni();
  if (feature == "amx_state") return tiles_refused().empty();
#define FM_CPU(name) (feature == #name && __builtin_cpu_supports(#name))
  return FM_CPU(avx2) || FM_CPU(fma) || FM_CPU(f16c) || FM_CPU(avx512f) || FM_CPU(avx512bw) ||
         FM_CPU(avx512dq) || FM_CPU(avx512vl) || FM_CPU(avx512bf16) || FM_CPU(avx512vnni);
#undef FM_CPU
}
#elif defined(__aarch64__)
// Code built for N-bit vectors gives wrong numbers without a sign of it on any other length, so the kernel is asked for
// the real one. prctl and not the RDVL instruction: this file is compiled for the baseline, which has no SVE.
inline const char* tiles_refused() { return ""; }
inline bool has_feature(const std::string& feature, int vector_bytes) {
  constexpr unsigned long HWCAP_SVE_BIT = 1UL << 22;
  constexpr int PR_SVE_GET_VL_CODE = 51, PR_SVE_VL_LENGTH = 0xffff;
  constexpr unsigned long HWCAP2_SVEI8MM_BIT = 1UL << 9, HWCAP2_SVEBF16_BIT = 1UL << 12,
                          HWCAP2_I8MM_BIT = 1UL << 13, HWCAP2_BF16_BIT = 1UL << 14;
  if (feature == "svei8mm") return getauxval(AT_HWCAP2) & HWCAP2_SVEI8MM_BIT;
  if (feature == "i8mm") return getauxval(AT_HWCAP2) & HWCAP2_I8MM_BIT;
  if (feature == "svebf16") return getauxval(AT_HWCAP2) & HWCAP2_SVEBF16_BIT;
  if (feature == "bf16") return getauxval(AT_HWCAP2) & HWCAP2_BF16_BIT;
  if (feature != "sve" || !(getauxval(AT_HWCAP) & HWCAP_SVE_BIT)) return false;
  return (prctl(PR_SVE_GET_VL_CODE) & PR_SVE_VL_LENGTH) == vector_bytes;
}
#else
inline const char* tiles_refused() { return ""; }
inline bool has_feature(const std::string&, int) { return false; }
#endif

}  // namespace fm::cpu
