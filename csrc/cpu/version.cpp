#include "exports.h"

const char* flashq_version() { return FLASHQ_VERSION; }
