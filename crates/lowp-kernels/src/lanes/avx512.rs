//! [`Avx512`]: sixteen lanes in one 512-bit register.

#![expect(unsafe_code, reason = "calls vector instructions that were detected")]

use std::arch::x86_64::*;

use half::bf16;

use super::{LANES, Lanes, Line};

/// Proof of AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// The proof, where the machine has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        (super::Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl"))
        .then_some(Self(()))
    }
}

/// Calls intrinsics on behalf of a method of [`Avx512`].
macro_rules! proven {
    ($body:expr) => {
        // SAFETY: `self` exists only where `detect` found the instructions. Loads and stores go
        // through references to arrays of the vector's size, and need no alignment.
        unsafe { $body }
    };
}

impl Lanes for Avx512 {
    type F = __m512;
    type U = __m512i;
    type B = __m128i;

    operations! {
        add(a: F, b: F) -> F = proven!(_mm512_add_ps(a, b));
        mul(a: F, b: F) -> F = proven!(_mm512_mul_ps(a, b));
        div(a: F, b: F) -> F = proven!(_mm512_div_ps(a, b));
        sqrt(a: F) -> F = proven!(_mm512_sqrt_ps(a));
        mul_add(a: F, b: F, c: F) -> F = proven!(_mm512_fmadd_ps(a, b, c));
        min(a: F, b: F) -> F = proven!(_mm512_min_ps(b, a));
        // Of an unordered pair the instruction returns the second operand.
        raise(acc: F, x: F) -> F = proven!(_mm512_max_ps(_mm512_abs_ps(x), acc));
        bits(x: F) -> U = proven!(_mm512_castps_si512(x));
        value(x: U) -> F = proven!(_mm512_castsi512_ps(x));
        and(a: U, b: U) -> U = proven!(_mm512_and_si512(a, b));
        or(a: U, b: U) -> U = proven!(_mm512_or_si512(a, b));
        uadd(a: U, b: U) -> U = proven!(_mm512_add_epi32(a, b));
        usub(a: U, b: U) -> U = proven!(_mm512_sub_epi32(a, b));
        umax(a: U, b: U) -> U = proven!(_mm512_max_epu32(a, b));
        umin(a: U, b: U) -> U = proven!(_mm512_min_epu32(a, b));
        narrow(x: U) -> B = proven!(_mm512_cvtepi32_epi8(x));
    }

    #[inline(always)]
    fn load(self, line: &Line) -> __m512 {
        proven!(_mm512_loadu_ps(line.as_ptr()))
    }
    #[inline(always)]
    fn store(self, x: __m512, line: &mut Line) {
        proven!(_mm512_storeu_ps(line.as_mut_ptr(), x));
    }
    #[inline(always)]
    fn load_bf16(self, line: &[bf16; LANES]) -> __m512 {
        proven!({
            let halves = _mm256_loadu_si256(line.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        })
    }
    #[inline(always)]
    fn prefetch(self, address: usize) {
        // A prefetch of any address is harmless.
        proven!(_mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(
            address
        )));
    }

    #[inline(always)]
    unsafe fn stream(self, x: __m512, line: &mut Line) {
        // The caller aligns the line and fences.
        proven!(_mm512_stream_ps(line.as_mut_ptr(), x));
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        proven!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn maxima(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        proven!({
            let ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            // Lanes of a quarter: a, b, c, d.
            let quarters = _mm512_max_ps(
                _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd),
                _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd),
            );
            let halves = _mm256_max_ps(
                _mm512_castps512_ps256(quarters),
                _mm512_extractf32x8_ps::<1>(quarters),
            );
            let last = _mm_max_ps(
                _mm256_castps256_ps128(halves),
                _mm256_extractf128_ps::<1>(halves),
            );
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), last);
            out
        })
    }

    #[inline(always)]
    fn usplat(self, x: u32) -> __m512i {
        proven!(_mm512_set1_epi32(x.cast_signed()))
    }
    #[inline(always)]
    fn shr<const BY: u32>(self, a: __m512i) -> __m512i {
        proven!(_mm512_srli_epi32::<BY>(a))
    }
    #[inline(always)]
    fn shl<const BY: u32>(self, a: __m512i) -> __m512i {
        proven!(_mm512_slli_epi32::<BY>(a))
    }
    #[inline(always)]
    fn any_above(self, a: __m512i, bound: u32) -> bool {
        proven!(_mm512_cmpgt_epu32_mask(a, _mm512_set1_epi32(bound.cast_signed())) != 0)
    }
    #[inline(always)]
    fn if_above(self, a: __m512i, b: __m512i, yes: __m512i, no: __m512i) -> __m512i {
        proven!(_mm512_mask_mov_epi32(
            no,
            _mm512_cmpgt_epu32_mask(a, b),
            yes
        ))
    }

    #[inline(always)]
    fn lookup(self, index: __m512i, table: &Line) -> __m512 {
        proven!(_mm512_permutexvar_ps(
            index,
            _mm512_loadu_ps(table.as_ptr())
        ))
    }
    #[inline(always)]
    fn signed(self, bytes: &[u8; LANES]) -> __m512i {
        proven!(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.as_ptr().cast())))
    }
    #[inline(always)]
    fn nibbles(self, bytes: &[u8; LANES / 2]) -> __m512i {
        proven!({
            let all = _mm512_set1_epi64(i64::from_le_bytes(*bytes));
            // The low word to the first eight lanes, the high one to the others.
            let words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let by = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            _mm512_srlv_epi32(_mm512_permutexvar_epi32(words, all), by)
        })
    }

    #[inline(always)]
    fn store_narrow(self, [a, b, c, d]: [__m512i; 4], bytes: &mut [u8; 4 * LANES]) {
        proven!({
            // Packing works on quarters: the four lanes of a quarter of each vector end up together.
            let low = _mm512_packus_epi32(a, b);
            let high = _mm512_packus_epi32(c, d);
            let packed = _mm512_packus_epi16(low, high);
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let sorted = _mm512_permutexvar_epi32(order, packed);
            _mm512_storeu_si512(bytes.as_mut_ptr().cast(), sorted);
        });
    }
    #[inline(always)]
    fn store_bytes(self, x: __m128i, bytes: &mut [u8; LANES]) {
        proven!(_mm_storeu_si128(bytes.as_mut_ptr().cast(), x));
    }
    #[inline(always)]
    fn pack_nibbles(self, codes: &[u8; 2 * LANES], bytes: &mut [u8; LANES]) {
        proven!(super::avx2::pack_nibbles(codes, bytes));
    }
    #[inline(always)]
    fn transpose_bytes(self, rows: [&[u8; LANES]; LANES]) -> [Self::B; LANES] {
        proven!(super::avx2::transpose_bytes(rows))
    }
}
