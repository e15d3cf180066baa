// The declarations and launches of each backend are made from this table of operators, whose kernels take
// their arguments and nothing else. update_rows and accumulate_rows, whose kernels need working memory, are
// written out beside it.
//
// The second table has two operators in one, whose launch a backend may make of those two.
#pragma once

// OP(name, arguments), in arguments.h; a kernel of the CPU does a range of what the comment names.
#define REC_SDK_OPERATORS(OP)                              \
  OP(lookup_sequence, LookupSequence)        /* lookups */ \
  OP(lookup_pooled, LookupPooled)            /* bags */    \
  OP(pooled_weights_grad, PooledWeightsGrad) /* lookups */ \
  OP(gather_rows, CopyRows)                  /* rows */    \
  OP(scatter_rows, CopyRows)                 /* rows */    \
  OP(swap_rows, SwapRows)                    /* rows */

#define REC_SDK_JOINED_OPERATORS(OP)           \
  OP(swap_lookup_sequence, SwapLookupSequence) \
  OP(swap_lookup_pooled, SwapLookupPooled)
