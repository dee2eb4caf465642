//! lowp-kernels
