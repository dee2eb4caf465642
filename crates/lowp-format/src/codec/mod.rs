//! The element formats, one file each: the scalar definition of correct.
//!
//! Every SIMD and device kernel must equal these functions bit for bit. They are written without
//! data-dependent branches, so a loop over them vectorises.

pub mod bf16;
pub mod e2m1;
pub mod e4m3;
pub mod e5m2;
pub mod e8m0;
pub mod remainder;
pub mod ue4m4;

/// Sign bit of a binary32, moved to bit 7.
const fn sign_byte(bits: u32) -> u32 {
    (bits >> 24) & 0x80
}
