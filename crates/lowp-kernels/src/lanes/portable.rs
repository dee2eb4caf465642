//! [`Portable`]: lanes as arrays, for every machine. The definition that the other sets equal.

#![expect(
    unsafe_code,
    reason = "implements the store past the caches as a plain one"
)]

use half::bf16;
use lowp_format::magnitude;

use super::{LANES, Lanes, Line};
use crate::rounding::bf16_value;

/// Arrays, without any assumption about the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

macro_rules! each {
    ($index:ident => $value:expr) => {
        std::array::from_fn(
            #[inline(always)]
            |$index| $value,
        )
    };
}

impl Lanes for Portable {
    type F = [f32; LANES];
    type U = [u32; LANES];
    type B = [u8; LANES];
    const STREAMS: bool = false;

    operations! {
        add(a: F, b: F) -> F = each!(i => a[i] + b[i]);
        mul(a: F, b: F) -> F = each!(i => a[i] * b[i]);
        div(a: F, b: F) -> F = each!(i => a[i] / b[i]);
        sqrt(a: F) -> F = each!(i => a[i].sqrt());
        mul_add(a: F, b: F, c: F) -> F = each!(i => a[i].mul_add(b[i], c[i]));
        min(a: F, b: F) -> F = each!(i => if b[i] < a[i] { b[i] } else { a[i] });
        raise(acc: F, x: F) -> F = each!(i => f32::from_bits(acc[i].to_bits().max(magnitude(x[i]))));
        bits(x: F) -> U = each!(i => x[i].to_bits());
        value(x: U) -> F = each!(i => f32::from_bits(x[i]));
        and(a: U, b: U) -> U = each!(i => a[i] & b[i]);
        or(a: U, b: U) -> U = each!(i => a[i] | b[i]);
        uadd(a: U, b: U) -> U = each!(i => a[i].wrapping_add(b[i]));
        usub(a: U, b: U) -> U = each!(i => a[i].wrapping_sub(b[i]));
        umax(a: U, b: U) -> U = each!(i => a[i].max(b[i]));
        umin(a: U, b: U) -> U = each!(i => a[i].min(b[i]));
        if_above(a: U, b: U, yes: U, no: U) -> U = each!(i => if a[i] > b[i] { yes[i] } else { no[i] });
        narrow(x: U) -> B = each!(i => x[i] as u8);
    }

    #[inline(always)]
    fn load(self, line: &Line) -> Self::F {
        *line
    }
    #[inline(always)]
    fn store(self, x: Self::F, line: &mut Line) {
        *line = x;
    }
    #[inline(always)]
    fn load_bf16(self, line: &[bf16; LANES]) -> Self::F {
        each!(i => bf16_value(line[i]))
    }
    #[inline(always)]
    fn prefetch(self, _: usize) {}
    #[inline(always)]
    unsafe fn stream(self, x: Self::F, line: &mut Line) {
        self.store(x, line);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn maxima(self, x: [Self::F; 4]) -> [f32; 4] {
        x.map(|lanes| lanes.iter().fold(0.0, |a, &b| if b > a { b } else { a }))
    }

    #[inline(always)]
    fn usplat(self, x: u32) -> Self::U {
        [x; LANES]
    }
    #[inline(always)]
    fn shr<const BY: u32>(self, a: Self::U) -> Self::U {
        each!(i => a[i] >> BY)
    }
    #[inline(always)]
    fn shl<const BY: u32>(self, a: Self::U) -> Self::U {
        each!(i => a[i] << BY)
    }
    #[inline(always)]
    fn any_above(self, a: Self::U, bound: u32) -> bool {
        a.iter().fold(false, |any, &x| any | (x > bound))
    }

    #[inline(always)]
    fn lookup(self, index: Self::U, table: &Line) -> Self::F {
        each!(i => table[index[i] as usize % LANES])
    }
    #[inline(always)]
    fn signed(self, bytes: &[u8; LANES]) -> Self::U {
        each!(i => i32::from(bytes[i].cast_signed()).cast_unsigned())
    }
    #[inline(always)]
    fn nibbles(self, bytes: &[u8; LANES / 2]) -> Self::U {
        each!(i => u32::from(bytes[i / 2] >> (4 * (i % 2))))
    }

    #[inline(always)]
    fn store_narrow(self, x: [Self::U; 4], bytes: &mut [u8; 4 * LANES]) {
        *bytes = each!(i => x[i / LANES][i % LANES] as u8);
    }
    #[inline(always)]
    fn store_bytes(self, x: Self::B, bytes: &mut [u8; LANES]) {
        *bytes = x;
    }
    #[inline(always)]
    fn pack_nibbles(self, codes: &[u8; 2 * LANES], bytes: &mut [u8; LANES]) {
        *bytes = each!(i => codes[2 * i] | codes[2 * i + 1] << 4);
    }
    #[inline(always)]
    fn transpose_bytes(self, rows: [&[u8; LANES]; LANES]) -> [Self::B; LANES] {
        each!(c => each!(r => rows[r][c]))
    }
}
