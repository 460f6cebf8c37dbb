/* What every stand-in shares. */
#ifndef KVPROOF_HOSTRT_H
#define KVPROOF_HOSTRT_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KVPROOF_EXPORT __attribute__((visibility("default")))

/* Says which entry nobody wrote and ends the process: a success that did nothing would be a silent fault. */
__attribute__((noreturn, unused)) static void kvproof_unimplemented(const char *library, const char *symbol)
{
    fprintf(stderr, "kvproof-hostrt: %s: %s is not implemented\n", library, symbol);
    fflush(stderr);
    abort();
}

#define KVPROOF_STUB(library, symbol) \
    KVPROOF_EXPORT void symbol(void) { kvproof_unimplemented(library, #symbol); }

#endif
