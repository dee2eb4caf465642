//! lowp-format
