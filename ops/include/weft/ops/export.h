#pragma once

// Marks what libweft_ops.so shows to others; everything else in it is hidden.
#define WEFT_OPS_API __attribute__((visibility("default")))
