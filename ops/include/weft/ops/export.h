#pragma once

// Marks the symbols that libweft_ops.so exports; all others are hidden.
#define WEFT_OPS_API __attribute__((visibility("default")))
