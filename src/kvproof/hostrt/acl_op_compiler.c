/* libacl_op_compiler.so: settings of an operator compiler that never runs here; nothing that compiles is written. */
#include "hostrt.h"

typedef int aclError;
#define ACL_SUCCESS 0
#define SETTING_BYTES 1

KVPROOF_EXPORT aclError aclSetCompileopt(int option, const char *value)
{
    (void)option, (void)value;
    return ACL_SUCCESS;
}

/* Bytes of a setting's value with its end: every setting is the empty word here. */
KVPROOF_EXPORT size_t aclGetCompileoptSize(int option)
{
    (void)option;
    return SETTING_BYTES;
}

KVPROOF_EXPORT aclError aclGetCompileopt(int option, char *value, size_t length)
{
    (void)option;
    if (length)
        value[0] = '\0';
    return ACL_SUCCESS;
}
