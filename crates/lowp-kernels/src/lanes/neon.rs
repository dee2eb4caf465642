//! [`Neon`]: sixteen lanes in four 128-bit registers.

#![expect(
    unsafe_code,
    reason = "calls vector instructions that every 64-bit Arm processor has"
)]

use std::arch::aarch64::*;

use half::bf16;

use super::{LANES, Lanes, Line};

/// Every 64-bit Arm processor has these instructions.
#[derive(Clone, Copy, Debug)]
pub struct Neon;

/// Calls intrinsics.
macro_rules! proven {
    ($body:expr) => {
        // SAFETY: NEON belongs to the architecture. Loads and stores go through references to arrays of the vectors' size, and need no
        // alignment.
        unsafe { $body }
    };
}

/// Applies a function to all quarters.
macro_rules! each {
    ($op:path; $($x:ident),+) => {
        [$op($($x[0]),+), $op($($x[1]),+), $op($($x[2]),+), $op($($x[3]),+)]
    };
}

/// `a * b + c`; the intrinsic takes the sum first.
#[inline(always)]
fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    proven!(vfmaq_f32(c, a, b))
}

/// `b` where it is smaller, and `a` of equal ones: zeros have signs.
#[inline(always)]
fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    proven!(vbslq_f32(vcltq_f32(b, a), b, a))
}

/// Of bits, as in the portable lanes.
#[inline(always)]
fn raise(acc: float32x4_t, x: float32x4_t) -> float32x4_t {
    proven!({
        let [acc, x] = [acc, vabsq_f32(x)].map(|x| vreinterpretq_u32_f32(x));
        let numbers = vcleq_u32(x, vdupq_n_u32(f32::INFINITY.to_bits()));
        let above = vandq_u32(vcgtq_u32(x, acc), numbers);
        vreinterpretq_f32_u32(vbslq_u32(above, x, acc))
    })
}

#[inline(always)]
fn if_above(a: uint32x4_t, b: uint32x4_t, yes: uint32x4_t, no: uint32x4_t) -> uint32x4_t {
    proven!(vbslq_u32(vcgtq_u32(a, b), yes, no))
}

/// Sixteen bytes as numbers.
#[inline(always)]
fn widen(bytes: uint8x16_t) -> [uint32x4_t; 4] {
    proven!({
        let [low, high] = [vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)];
        [
            vmovl_u16(vget_low_u16(low)),
            vmovl_high_u16(low),
            vmovl_u16(vget_low_u16(high)),
            vmovl_high_u16(high),
        ]
    })
}

impl Lanes for Neon {
    type F = [float32x4_t; 4];
    type U = [uint32x4_t; 4];
    type B = uint8x16_t;
    const STREAMS: bool = false;

    operations! {
        add(a: F, b: F) -> F = proven!(each!(vaddq_f32; a, b));
        mul(a: F, b: F) -> F = proven!(each!(vmulq_f32; a, b));
        div(a: F, b: F) -> F = proven!(each!(vdivq_f32; a, b));
        sqrt(a: F) -> F = proven!(each!(vsqrtq_f32; a));
        mul_add(a: F, b: F, c: F) -> F = each!(mul_add; a, b, c);
        min(a: F, b: F) -> F = each!(min; a, b);
        raise(acc: F, x: F) -> F = each!(raise; acc, x);
        bits(x: F) -> U = proven!(each!(vreinterpretq_u32_f32; x));
        value(x: U) -> F = proven!(each!(vreinterpretq_f32_u32; x));
        and(a: U, b: U) -> U = proven!(each!(vandq_u32; a, b));
        or(a: U, b: U) -> U = proven!(each!(vorrq_u32; a, b));
        uadd(a: U, b: U) -> U = proven!(each!(vaddq_u32; a, b));
        usub(a: U, b: U) -> U = proven!(each!(vsubq_u32; a, b));
        umax(a: U, b: U) -> U = proven!(each!(vmaxq_u32; a, b));
        umin(a: U, b: U) -> U = proven!(each!(vminq_u32; a, b));
        if_above(a: U, b: U, yes: U, no: U) -> U = each!(if_above; a, b, yes, no);
    }

    #[inline(always)]
    fn load(self, line: &Line) -> Self::F {
        proven!({
            let from = line.as_ptr();
            [
                vld1q_f32(from),
                vld1q_f32(from.add(4)),
                vld1q_f32(from.add(8)),
                vld1q_f32(from.add(12)),
            ]
        })
    }
    #[inline(always)]
    fn store(self, x: Self::F, line: &mut Line) {
        proven!({
            let to = line.as_mut_ptr();
            vst1q_f32(to, x[0]);
            vst1q_f32(to.add(4), x[1]);
            vst1q_f32(to.add(8), x[2]);
            vst1q_f32(to.add(12), x[3]);
        })
    }
    #[inline(always)]
    fn load_bf16(self, line: &[bf16; LANES]) -> Self::F {
        proven!({
            let from = line.as_ptr().cast::<u16>();
            let [low, high] = [vld1q_u16(from), vld1q_u16(from.add(8))];
            self.value([
                vshll_n_u16::<16>(vget_low_u16(low)),
                vshll_high_n_u16::<16>(low),
                vshll_n_u16::<16>(vget_low_u16(high)),
                vshll_high_n_u16::<16>(high),
            ])
        })
    }
    #[inline(always)]
    fn prefetch(self, _: usize) {}
    #[inline(always)]
    unsafe fn stream(self, x: Self::F, line: &mut Line) {
        self.store(x, line);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        proven!([vdupq_n_f32(x); 4])
    }
    #[inline(always)]
    fn maxima(self, x: [Self::F; 4]) -> [f32; 4] {
        proven!({
            let most = |x: Self::F| vmaxq_f32(vmaxq_f32(x[0], x[1]), vmaxq_f32(x[2], x[3]));
            let [a, b, c, d] = [most(x[0]), most(x[1]), most(x[2]), most(x[3])];
            let all = vpmaxq_f32(vpmaxq_f32(a, b), vpmaxq_f32(c, d));
            let mut out = [0.0; 4];
            vst1q_f32(out.as_mut_ptr(), all);
            out
        })
    }

    #[inline(always)]
    fn usplat(self, x: u32) -> Self::U {
        proven!([vdupq_n_u32(x); 4])
    }
    #[inline(always)]
    fn shr<const BY: u32>(self, a: Self::U) -> Self::U {
        proven!({
            let by = vdupq_n_s32(-BY.cast_signed());
            [
                vshlq_u32(a[0], by),
                vshlq_u32(a[1], by),
                vshlq_u32(a[2], by),
                vshlq_u32(a[3], by),
            ]
        })
    }
    #[inline(always)]
    fn shl<const BY: u32>(self, a: Self::U) -> Self::U {
        proven!({
            let by = vdupq_n_s32(BY.cast_signed());
            [
                vshlq_u32(a[0], by),
                vshlq_u32(a[1], by),
                vshlq_u32(a[2], by),
                vshlq_u32(a[3], by),
            ]
        })
    }
    #[inline(always)]
    fn any_above(self, a: Self::U, bound: u32) -> bool {
        proven!(vmaxvq_u32(vmaxq_u32(vmaxq_u32(a[0], a[1]), vmaxq_u32(a[2], a[3]))) > bound)
    }

    #[inline(always)]
    fn lookup(self, index: Self::U, table: &Line) -> Self::F {
        proven!({
            let table = self.bits(self.load(table));
            let table = uint8x16x4_t(
                vreinterpretq_u8_u32(table[0]),
                vreinterpretq_u8_u32(table[1]),
                vreinterpretq_u8_u32(table[2]),
                vreinterpretq_u8_u32(table[3]),
            );
            let mut out = index;
            for lanes in &mut out {
                // The four bytes of entry `i` are those from `4 i` on.
                let index = vandq_u32(*lanes, vdupq_n_u32(0xF));
                let first = vmulq_u32(index, vdupq_n_u32(0x0404_0404));
                let bytes = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x0302_0100)));
                *lanes = vreinterpretq_u32_u8(vqtbl4q_u8(table, bytes));
            }
            self.value(out)
        })
    }
    #[inline(always)]
    fn signed(self, bytes: &[u8; LANES]) -> Self::U {
        proven!({
            let bytes = vld1q_s8(bytes.as_ptr().cast());
            let [low, high] = [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)];
            [
                vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(low))),
                vreinterpretq_u32_s32(vmovl_high_s16(low)),
                vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(high))),
                vreinterpretq_u32_s32(vmovl_high_s16(high)),
            ]
        })
    }
    #[inline(always)]
    fn nibbles(self, bytes: &[u8; LANES / 2]) -> Self::U {
        proven!({
            let bytes = vld1_u8(bytes.as_ptr());
            let high = vshr_n_u8::<4>(bytes);
            widen(vcombine_u8(vzip1_u8(bytes, high), vzip2_u8(bytes, high)))
        })
    }

    #[inline(always)]
    fn narrow(self, x: Self::U) -> uint8x16_t {
        proven!({
            let low = |a, b| vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
            let [a, b] = [low(x[0], x[1]), low(x[2], x[3])];
            vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b))
        })
    }
    #[inline(always)]
    fn store_narrow(self, x: [Self::U; 4], bytes: &mut [u8; 4 * LANES]) {
        for (x, bytes) in x.into_iter().zip(bytes.as_chunks_mut::<LANES>().0) {
            self.store_bytes(self.narrow(x), bytes);
        }
    }
    #[inline(always)]
    fn store_bytes(self, x: uint8x16_t, bytes: &mut [u8; LANES]) {
        proven!({
            vst1q_u8(bytes.as_mut_ptr(), x);
        })
    }
    #[inline(always)]
    fn pack_nibbles(self, codes: &[u8; 2 * LANES], bytes: &mut [u8; LANES]) {
        proven!({
            let uint8x16x2_t(low, high) = vld2q_u8(codes.as_ptr());
            self.store_bytes(vorrq_u8(low, vshlq_n_u8::<4>(high)), bytes);
        })
    }
    /// In four rounds; each interleaves row `i` with row `i + 8`.
    #[inline(always)]
    fn transpose_bytes(self, from: [&[u8; LANES]; LANES]) -> [Self::B; LANES] {
        proven!({
            let mut rows = [vdupq_n_u8(0); LANES];
            for (row, from) in rows.iter_mut().zip(from) {
                *row = vld1q_u8(from.as_ptr());
            }
            for _ in 0..4 {
                let old = rows;
                for i in 0..8 {
                    rows[2 * i] = vzip1q_u8(old[i], old[i + 8]);
                    rows[2 * i + 1] = vzip2q_u8(old[i], old[i + 8]);
                }
            }
            rows
        })
    }
}
