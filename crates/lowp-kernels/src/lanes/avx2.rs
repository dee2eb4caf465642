//! [`Avx2`]: sixteen lanes in two 256-bit registers.

#![expect(unsafe_code, reason = "calls vector instructions that were detected")]

use std::arch::x86_64::*;

use half::bf16;

use super::{LANES, Lanes, Line};

/// Proof of AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, where the machine has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt"))
        .then_some(Self(()))
    }
}

/// Calls intrinsics on behalf of a method of [`Avx2`].
macro_rules! proven {
    ($body:expr) => {
        // SAFETY: `self` exists only where `detect` found the instructions. Loads and stores go
        // through references to arrays of the vectors' size, and need no alignment.
        unsafe { $body }
    };
}

/// Applies an intrinsic to both halves.
macro_rules! both {
    ($op:path; $($x:ident),+) => {
        proven!([$op($($x[0]),+), $op($($x[1]),+)])
    };
}

impl Lanes for Avx2 {
    type F = [__m256; 2];
    type U = [__m256i; 2];
    type B = __m128i;

    operations! {
        add(a: F, b: F) -> F = both!(_mm256_add_ps; a, b);
        mul(a: F, b: F) -> F = both!(_mm256_mul_ps; a, b);
        div(a: F, b: F) -> F = both!(_mm256_div_ps; a, b);
        sqrt(a: F) -> F = both!(_mm256_sqrt_ps; a);
        mul_add(a: F, b: F, c: F) -> F = both!(_mm256_fmadd_ps; a, b, c);
        min(a: F, b: F) -> F = both!(_mm256_min_ps; b, a);
        bits(x: F) -> U = both!(_mm256_castps_si256; x);
        value(x: U) -> F = both!(_mm256_castsi256_ps; x);
        and(a: U, b: U) -> U = both!(_mm256_and_si256; a, b);
        or(a: U, b: U) -> U = both!(_mm256_or_si256; a, b);
        uadd(a: U, b: U) -> U = both!(_mm256_add_epi32; a, b);
        usub(a: U, b: U) -> U = both!(_mm256_sub_epi32; a, b);
        umax(a: U, b: U) -> U = both!(_mm256_max_epu32; a, b);
        umin(a: U, b: U) -> U = both!(_mm256_min_epu32; a, b);
    }

    #[inline(always)]
    fn load(self, line: &Line) -> Self::F {
        proven!([
            _mm256_loadu_ps(line.as_ptr()),
            _mm256_loadu_ps(line[8..].as_ptr())
        ])
    }
    #[inline(always)]
    fn store(self, x: Self::F, line: &mut Line) {
        proven!({
            _mm256_storeu_ps(line.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(line[8..].as_mut_ptr(), x[1]);
        });
    }
    #[inline(always)]
    fn load_bf16(self, line: &[bf16; LANES]) -> Self::F {
        proven!({
            let halves = _mm256_loadu_si256(line.as_ptr().cast());
            let zero = _mm256_setzero_si256();
            // Unpacking works on quarters: 0 and 2 of each result are put in order.
            let [low, high] = [
                _mm256_unpacklo_epi16(zero, halves),
                _mm256_unpackhi_epi16(zero, halves),
            ];
            [
                _mm256_castsi256_ps(_mm256_permute2x128_si256::<0x20>(low, high)),
                _mm256_castsi256_ps(_mm256_permute2x128_si256::<0x31>(low, high)),
            ]
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
    unsafe fn stream(self, x: Self::F, line: &mut Line) {
        // The caller aligns the line and fences.
        proven!({
            _mm256_stream_ps(line.as_mut_ptr(), x[0]);
            _mm256_stream_ps(line[8..].as_mut_ptr(), x[1]);
        });
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        proven!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn raise(self, acc: Self::F, x: Self::F) -> Self::F {
        // Of an unordered pair the instruction returns the second operand.
        proven!({
            let sign = _mm256_set1_ps(-0.0);
            [
                _mm256_max_ps(_mm256_andnot_ps(sign, x[0]), acc[0]),
                _mm256_max_ps(_mm256_andnot_ps(sign, x[1]), acc[1]),
            ]
        })
    }
    #[inline(always)]
    fn maxima(self, x: [Self::F; 4]) -> [f32; 4] {
        proven!({
            let [a, b, c, d] = [
                _mm256_max_ps(x[0][0], x[0][1]),
                _mm256_max_ps(x[1][0], x[1][1]),
                _mm256_max_ps(x[2][0], x[2][1]),
                _mm256_max_ps(x[3][0], x[3][1]),
            ];
            let ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let halves = _mm256_max_ps(
                _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd),
                _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd),
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
    fn usplat(self, x: u32) -> Self::U {
        proven!([_mm256_set1_epi32(x.cast_signed()); 2])
    }
    #[inline(always)]
    fn shr<const BY: u32>(self, a: Self::U) -> Self::U {
        proven!({
            let by = _mm_cvtsi32_si128(BY.cast_signed());
            [_mm256_srl_epi32(a[0], by), _mm256_srl_epi32(a[1], by)]
        })
    }
    #[inline(always)]
    fn shl<const BY: u32>(self, a: Self::U) -> Self::U {
        proven!({
            let by = _mm_cvtsi32_si128(BY.cast_signed());
            [_mm256_sll_epi32(a[0], by), _mm256_sll_epi32(a[1], by)]
        })
    }
    #[inline(always)]
    fn any_above(self, a: Self::U, bound: u32) -> bool {
        proven!({
            let bound = _mm256_set1_epi32(bound.cast_signed());
            let most = _mm256_max_epu32(_mm256_max_epu32(a[0], a[1]), bound);
            _mm256_movemask_epi8(_mm256_cmpeq_epi32(most, bound)) != -1
        })
    }
    #[inline(always)]
    fn if_above(self, a: Self::U, b: Self::U, yes: Self::U, no: Self::U) -> Self::U {
        proven!({
            [
                _mm256_blendv_epi8(no[0], yes[0], _mm256_cmpgt_epi32(a[0], b[0])),
                _mm256_blendv_epi8(no[1], yes[1], _mm256_cmpgt_epi32(a[1], b[1])),
            ]
        })
    }

    #[inline(always)]
    fn lookup(self, index: Self::U, table: &Line) -> Self::F {
        proven!({
            let low = _mm256_loadu_ps(table.as_ptr());
            let high = _mm256_loadu_ps(table[8..].as_ptr());
            // A permutation reads three bits of an index; the fourth, moved to the sign, chooses.
            let mut out = [low; 2];
            for i in 0..2 {
                let fourth = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index[i]));
                out[i] = _mm256_blendv_ps(
                    _mm256_permutevar8x32_ps(low, index[i]),
                    _mm256_permutevar8x32_ps(high, index[i]),
                    fourth,
                );
            }
            out
        })
    }
    #[inline(always)]
    fn signed(self, bytes: &[u8; LANES]) -> Self::U {
        proven!({
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            [
                _mm256_cvtepi8_epi32(bytes),
                _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes)),
            ]
        })
    }
    #[inline(always)]
    fn nibbles(self, bytes: &[u8; LANES / 2]) -> Self::U {
        proven!({
            let all = i64::from_le_bytes(*bytes);
            let by = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            [
                _mm256_srlv_epi32(_mm256_set1_epi32(all as i32), by),
                _mm256_srlv_epi32(_mm256_set1_epi32((all >> 32) as i32), by),
            ]
        })
    }

    #[inline(always)]
    fn narrow(self, x: Self::U) -> __m128i {
        proven!({
            // Quarters of the packed words: 0, 2, 1, 3 of the lanes.
            let words = _mm256_packus_epi32(x[0], x[1]);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            _mm_packus_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            )
        })
    }
    #[inline(always)]
    fn store_narrow(self, x: [Self::U; 4], bytes: &mut [u8; 4 * LANES]) {
        for (x, bytes) in x.into_iter().zip(bytes.as_chunks_mut::<LANES>().0) {
            self.store_bytes(self.narrow(x), bytes);
        }
    }
    #[inline(always)]
    fn store_bytes(self, x: __m128i, bytes: &mut [u8; LANES]) {
        proven!(_mm_storeu_si128(bytes.as_mut_ptr().cast(), x));
    }
    #[inline(always)]
    fn pack_nibbles(self, codes: &[u8; 2 * LANES], bytes: &mut [u8; LANES]) {
        proven!(pack_nibbles(codes, bytes));
    }
    #[inline(always)]
    fn transpose_bytes(self, rows: [&[u8; LANES]; LANES]) -> [Self::B; LANES] {
        proven!(transpose_bytes(rows))
    }
}

/// Packs nibbles: a pair of bytes is the dot product with (1, 16).
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn pack_nibbles(codes: &[u8; 2 * LANES], bytes: &mut [u8; LANES]) {
    // SAFETY: as the function requires; loads and stores go through arrays of the vectors' size.
    unsafe {
        let codes = _mm256_loadu_si256(codes.as_ptr().cast());
        let words = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
        let packed = _mm_packus_epi16(
            _mm256_castsi256_si128(words),
            _mm256_extracti128_si256::<1>(words),
        );
        _mm_storeu_si128(bytes.as_mut_ptr().cast(), packed);
    }
}

/// Transposes 16x16 bytes in four rounds; each interleaves row `i` with row `i + 8`.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn transpose_bytes(from: [&[u8; LANES]; LANES]) -> [__m128i; LANES] {
    // SAFETY: as the function requires; loads go through arrays of the vector's size.
    unsafe {
        let mut rows = [_mm_setzero_si128(); LANES];
        for (row, from) in rows.iter_mut().zip(from) {
            *row = _mm_loadu_si128(from.as_ptr().cast());
        }
        for _ in 0..4 {
            let old = rows;
            for i in 0..8 {
                rows[2 * i] = _mm_unpacklo_epi8(old[i], old[i + 8]);
                rows[2 * i + 1] = _mm_unpackhi_epi8(old[i], old[i + 8]);
            }
        }
        rows
    }
}
