//! [`audit`]: does a gathered tensor hold what its masters say?

use std::fmt;

use lowp_format::{BufferKey, Orientation, Part, QuantizedTensor, Recipe};
use lowp_kernels::{Backend, Source};

use crate::ShardError;
use crate::whole::quantize_in_group;

/// The first byte in which a tensor differs from a full cast of its masters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The buffer that differs.
    pub key: BufferKey,
    /// The first byte of the buffer that differs.
    pub byte: usize,
    /// What the tensor holds.
    pub found: u8,
    /// What the masters give.
    pub expected: u8,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            key,
            byte,
            found,
            expected,
        } = self;
        write!(
            f,
            "{key}: byte {byte} is 0x{found:02X} where a cast of the masters gives 0x{expected:02X}"
        )
    }
}

/// Compares every buffer of `tensor` that serves `orientation` with a full cast of `master`, the
/// f32 values of the whole matrix in row-major order.
///
/// A delayed scale is not a function of the masters; there the stored decode scale is taken as
/// given, and the codes are compared with a cast by an encode scale whose reciprocal it is.
///
/// Catches what no shape check can: a scale that changed after its codes were written, a copy that
/// an update left behind, a shard that was cast with a scale of its own.
///
/// # Errors
/// The tensor cannot serve `orientation`, or `master` has another length.
pub fn audit<B: Backend, R: Recipe>(
    backend: &B,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    orientation: Orientation,
    master: &B::Buffer<f32>,
) -> Result<Option<Divergence>, ShardError> {
    audit_in_group(backend, tensor, orientation, master, None)
}

/// [`audit`] of a tensor that has one amax with others, that of them all
/// ([`ScaleBookBuilder::group`](crate::ScaleBookBuilder::group)).
///
/// # Errors
/// As [`audit`].
pub fn audit_in_group<B: Backend, R: Recipe>(
    backend: &B,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    orientation: Orientation,
    master: &B::Buffer<f32>,
    amax: Option<f32>,
) -> Result<Option<Divergence>, ShardError> {
    tensor.data(orientation)?;
    let mut first = None;
    for scale in encode_scales(backend, tensor, orientation)? {
        let (recipe, shape) = (tensor.recipe(), tensor.shape());
        let source = Source::F32(master.clone());
        let usage = orientation.usage();
        let cast = quantize_in_group(backend, recipe, shape, usage, source, scale, amax)?;
        let Some(divergence) = first_difference(backend, tensor, &cast, orientation)? else {
            return Ok(None);
        };
        first.get_or_insert(divergence);
    }
    Ok(first)
}

/// The encode scales that the stored decode scale may come from: one `None` where scales follow
/// from the values.
fn encode_scales<B: Backend, R: Recipe>(
    backend: &B,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    orientation: Orientation,
) -> Result<Vec<Option<f32>>, ShardError> {
    let delayed = tensor.recipe().kernel(orientation).scale.is_delayed();
    let stored = tensor.part(orientation, Part::DecodeScale);
    let (true, Some(stored)) = (delayed, stored) else {
        return Ok(vec![None]);
    };
    let mut bytes = [0; 4];
    backend.read(&stored.storage, 0, &mut bytes)?;
    let scale_inv = f32::from_le_bytes(bytes);
    // Rounding makes the reciprocal of the reciprocal miss by at most two units in the last place.
    let near = (1.0 / scale_inv).to_bits();
    let candidates = (near.saturating_sub(2)..=near.saturating_add(2)).map(f32::from_bits);
    let mut scales: Vec<Option<f32>> = candidates
        .filter(|s| (1.0 / s).to_bits() == scale_inv.to_bits())
        .map(Some)
        .collect();
    if scales.is_empty() {
        // No scale has this reciprocal: any cast will show it.
        scales.push(Some(1.0 / scale_inv));
    }
    Ok(scales)
}

/// The first byte in which `tensor` and `cast` differ.
fn first_difference<B: Backend, R: Recipe>(
    backend: &B,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    cast: &QuantizedTensor<B::Buffer<u8>, R>,
    orientation: Orientation,
) -> Result<Option<Divergence>, ShardError> {
    for expected in cast.buffers() {
        let key = expected.spec.key;
        let Some(found) = tensor.part(orientation, key.part) else {
            continue;
        };
        let found = backend.download(&found.storage)?;
        let expected = backend.download(&expected.storage)?;
        if let Some(byte) = first_other(&found, &expected) {
            let (found, expected) = (found[byte], expected[byte]);
            return Ok(Some(Divergence {
                key,
                byte,
                found,
                expected,
            }));
        }
    }
    Ok(None)
}

/// The first place in which they differ. Without type parameters, so that it is compiled here, optimized.
fn first_other(found: &[u8], expected: &[u8]) -> Option<usize> {
    if found == expected {
        return None;
    }
    found.iter().zip(expected).position(|(a, b)| a != b)
}
