//! [`Lanes`]: sixteen f32 lanes, the vector that every hot loop is written in.
//!
//! A value of a type that implements it proves that the machine has the instructions: only
//! [`isa`] makes them, after detection. Every set gives the same bits: integer operations
//! are exact, and float operations round once, to nearest.

/// Methods of an implementation of [`Lanes`] that take and return vectors: what each computes.
macro_rules! operations {
    ($($name:ident($($arg:ident: $Arg:ident),+) -> $Out:ident = $body:expr;)+) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Self::$Arg),+) -> Self::$Out {
            $body
        }
    )+};
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod isa;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod stream;
#[cfg(test)]
mod tests;
mod transpose;

use half::bf16;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub use isa::Isa;
pub(crate) use isa::Kernel;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;
pub(crate) use stream::{Out, Stored};
pub(crate) use transpose::{Transpose, TransposeDense};

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// One vector of f32 in memory.
pub(crate) type Line = [f32; LANES];

/// Sixteen lanes of f32, u32 and u8, and what can be done with them. All methods are
/// `#[inline(always)]`, so that they melt into the loop that [`Isa::run`] compiles.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// f32 in every lane.
    type F: Copy;
    /// u32 in every lane.
    type U: Copy;
    /// u8 in every lane.
    type B: Copy;
    /// Whether [`Lanes::stream`] passes the caches.
    const STREAMS: bool = true;

    /// The values of `line`.
    fn load(self, line: &Line) -> Self::F;
    /// Stores all lanes.
    fn store(self, x: Self::F, line: &mut Line);
    /// The values of `line`, widened exactly.
    fn load_bf16(self, line: &[bf16; LANES]) -> Self::F;
    /// Asks for the cache line of an address, which may lie outside memory.
    fn prefetch(self, address: usize);
    /// Stores all lanes past the caches.
    ///
    /// # Safety
    /// `line` is aligned to 64 bytes. The thread calls `_mm_sfence` before anybody reads it.
    #[expect(
        unsafe_code,
        reason = "the caller aligns the line and fences the store"
    )]
    unsafe fn stream(self, x: Self::F, line: &mut Line);

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::F;
    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The square root.
    fn sqrt(self, a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The smaller of two numbers that are not NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// The larger of `|x|` and `acc`, which is not NaN; `acc` where `x` is NaN.
    fn raise(self, acc: Self::F, x: Self::F) -> Self::F;
    /// The largest lane of each of four vectors of nonnegative numbers.
    fn maxima(self, x: [Self::F; 4]) -> [f32; 4];

    /// The bits of every lane.
    fn bits(self, x: Self::F) -> Self::U;
    /// The values that bits stand for.
    fn value(self, x: Self::U) -> Self::F;
    /// `x` in every lane.
    fn usplat(self, x: u32) -> Self::U;
    /// `a & b`.
    fn and(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a | b`.
    fn or(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a + b`, wrapping.
    fn uadd(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a - b`, wrapping.
    fn usub(self, a: Self::U, b: Self::U) -> Self::U;
    /// `a >> BY`.
    fn shr<const BY: u32>(self, a: Self::U) -> Self::U;
    /// `a << BY`.
    fn shl<const BY: u32>(self, a: Self::U) -> Self::U;
    /// The smaller, as unsigned numbers.
    fn umin(self, a: Self::U, b: Self::U) -> Self::U;
    /// The larger, as unsigned numbers.
    fn umax(self, a: Self::U, b: Self::U) -> Self::U;
    /// `yes` where `a > b`, else `no`. Both sides lie below 2^31.
    fn if_above(self, a: Self::U, b: Self::U, yes: Self::U, no: Self::U) -> Self::U;

    /// The value of `table` that the low four bits of every lane name.
    fn lookup(self, index: Self::U, table: &Line) -> Self::F;
    /// Every byte as a signed number.
    fn signed(self, bytes: &[u8; LANES]) -> Self::U;
    /// Every nibble, the first of a byte in its low half, in the low four bits of its lane. The
    /// other bits are any.
    fn nibbles(self, bytes: &[u8; LANES / 2]) -> Self::U;

    /// Whether a lane of `a`, as an unsigned number, is above `bound`.
    fn any_above(self, a: Self::U, bound: u32) -> bool;

    /// The low byte of every lane; lanes lie below 256.
    fn narrow(self, x: Self::U) -> Self::B;
    /// Stores the low bytes of four vectors; lanes lie below 256.
    fn store_narrow(self, x: [Self::U; 4], bytes: &mut [u8; 4 * LANES]);
    /// Stores all bytes.
    fn store_bytes(self, x: Self::B, bytes: &mut [u8; LANES]);
    /// Packs 32 nibbles to 16 bytes, the first of a pair in the low nibble.
    fn pack_nibbles(self, codes: &[u8; 2 * LANES], bytes: &mut [u8; LANES]);
    /// The columns of a 16x16 matrix of bytes.
    fn transpose_bytes(self, rows: [&[u8; LANES]; LANES]) -> [Self::B; LANES];
}
