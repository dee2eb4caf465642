//! Buckets: the buffers of tensors as parts of a caller's buffer.

use lowp_format::{QuantizedTensor, Recipe};
use lowp_kernels::Backend;

use crate::{ShardError, ShardedTensor};

/// Each buffer of a tensor in a bucket begins at a multiple of this many bytes from the bucket's start: what
/// devices give their own allocations, so no kernel takes a slower path.
pub const BUCKET_ALIGN: usize = 256;

/// Bytes that `tensor` takes in a bucket, a multiple of [`BUCKET_ALIGN`]: its buffers in their order, each padded.
pub fn bucket_bytes<S, R: Recipe>(tensor: &QuantizedTensor<S, R>) -> usize {
    let padded = |bytes: usize| bytes.next_multiple_of(BUCKET_ALIGN);
    let buffers = tensor.buffers().iter();
    buffers.map(|b| padded(b.spec.bytes(tensor.shape()))).sum()
}

/// Moves `tensor` into the bytes of `bucket` from `offset` on: returns it over views of the bucket, with its
/// content. The next tensor may follow at `offset + bucket_bytes(tensor)`. Padding is not written, and `tensor`
/// keeps its own buffers: what was planned over them works on those.
///
/// # Errors
/// An offset that is no multiple of [`BUCKET_ALIGN`], too little room, a bucket that the tensor lies in already,
/// or a device failure.
pub fn move_into<B: Backend, R: Recipe>(
    backend: &B,
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
    bucket: &B::Buffer<u8>,
    offset: usize,
) -> Result<QuantizedTensor<B::Buffer<u8>, R>, ShardError> {
    let (needed, len) = (bucket_bytes(tensor), backend.len(bucket));
    let align = BUCKET_ALIGN;
    if !offset.is_multiple_of(align) {
        return Err(ShardError::BucketOffset { offset, align });
    }
    if offset > len || len - offset < needed {
        return Err(ShardError::BucketRoom {
            offset,
            needed,
            len,
        });
    }
    let mut start = offset;
    tensor.try_map(|buffer| {
        let bytes = buffer.spec.bytes(tensor.shape());
        let place = backend.view::<u8>(bucket, start..start + bytes)?;
        backend.copy(&buffer.storage, 0..bytes, &place, 0)?;
        start += bytes.next_multiple_of(align);
        Ok(place)
    })
}

impl<B: Backend, R: Recipe> ShardedTensor<B, R> {
    /// The same rows in `bucket`, as [`move_into`] moves them. It shares the version with this one: gather groups and
    /// casts are made of one of them, and their plans keep its buffers.
    ///
    /// # Errors
    /// As [`move_into`], or rows that cut blocks.
    pub fn move_into(
        &self,
        backend: &B,
        bucket: &B::Buffer<u8>,
        offset: usize,
    ) -> Result<Self, ShardError> {
        let spec = self.spec();
        if spec.cuts_blocks() {
            let (full, rows) = (spec.full(), spec.rows());
            return Err(ShardError::BucketOfCutBlocks { full, rows });
        }
        let tensor = move_into(backend, self.local(), bucket, offset)?;
        Ok(self.with_tensor(tensor))
    }
}
