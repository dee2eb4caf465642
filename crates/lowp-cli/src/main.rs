//! lowp
fn main() {}
