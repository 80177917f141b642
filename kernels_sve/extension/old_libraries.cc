// Functions that glibc 2.29 to 2.34 and GCC 11 gave new versions, through their older versions: an extension that is
// linked with newer libraries loads with glibc 2.28 and GCC 8's libstdc++ (manylinux_2_28), too. Tested by
// tests/packaging/test_wheel.py.
#include <features.h>

#include <new>

#if defined(__GLIBC__)

#if defined(__x86_64__)
#define FM_OLD(name, x86_64, aarch64) __asm__(".symver old_" #name "," #name "@GLIBC_" x86_64)
#else
#define FM_OLD(name, x86_64, aarch64) __asm__(".symver old_" #name "," #name "@GLIBC_" aarch64)
#endif

FM_OLD(exp, "2.2.5", "2.17");
FM_OLD(log, "2.2.5", "2.17");
FM_OLD(pow, "2.2.5", "2.17");
FM_OLD(dlopen, "2.2.5", "2.17");
FM_OLD(dlsym, "2.2.5", "2.17");
FM_OLD(dladdr1, "2.3.3", "2.17");

// Not exported: -fvisibility=hidden.
extern "C" {
double old_exp(double);
double old_log(double);
double old_pow(double, double);
void* old_dlopen(const char*, int);
void* old_dlsym(void*, const char*);
int old_dladdr1(const void*, void*, void**, int);

double exp(double x) { return old_exp(x); }
double log(double x) { return old_log(x); }
double pow(double x, double y) { return old_pow(x, y); }
void* dlopen(const char* file, int mode) { return old_dlopen(file, mode); }
void* dlsym(void* handle, const char* name) { return old_dlsym(handle, name); }
int dladdr1(const void* address, void* info, void** extra, int flags) {
  return old_dladdr1(address, info, extra, flags);
}

char __libc_single_threaded = 0;  // libstdc++ then counts references atomically

// std::exception_ptr: its copy and its end have been functions since GCC 4.4.
void copy_exception(void* to,
                    const void* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void end_exception(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
void add_reference(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void release(void** pointer) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void add_reference(void* pointer) {
  void* copy;
  copy_exception(&copy, pointer);
}
void release(void** pointer) {
  end_exception(pointer);
  *pointer = nullptr;
}

void throw_bad_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_length() { throw std::bad_array_new_length(); }
}

#endif
