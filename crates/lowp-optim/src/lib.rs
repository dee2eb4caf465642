//! lowp-optim
