/* libhccl.so on a machine without CANN: one rank, so no communicator is ever made. Every entry is left to the stubs. */
#include "hostrt.h"

/* An ISO C file must not be empty; this names the build in a core dump. */
__attribute__((used)) static const char built_by[] = "kvproof stand-in for libhccl.so";
