// Tables of operators, from which the declarations and launches of each backend are generated. The first
// table lists the operators whose kernels take only their arguments. update_rows and accumulate_rows are not
// listed: their kernels need working memory, so each backend declares them by hand.
//
// The second table lists operators that combine two others. A backend may launch the two one after the other.
#pragma once

// OP(name, type of the arguments, see arguments.h). The comment names the items of which a CPU kernel
// processes a range.
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
