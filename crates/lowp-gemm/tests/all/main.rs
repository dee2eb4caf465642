//! Tests of the products of a CPU.

mod products;
