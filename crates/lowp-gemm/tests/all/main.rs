//! Tests of products on every backend.

mod products;
