// What GCC's C++ library asks of a glibc newer than the one that the module is linked for (setup.py, LORA_MERGE_GLIBC).

// Whether the process has one thread, so that counters need not be atomic: never said so.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
