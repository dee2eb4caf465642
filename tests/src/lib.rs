//! lowp-tests
