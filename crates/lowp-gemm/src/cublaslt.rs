//! [`Matmuls`]: products by cuBLASLt, each planned once.

#![expect(unsafe_code, reason = "calls cuBLASLt")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{from_ref, null};
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys;
use lowp_kernels::{Cuda, KernelError};

use crate::{MatmulError, Workspace};

/// Products that are kept: batches of many sizes would add to them without end.
const MOST: usize = 4096;

/// What a matrix holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
    /// FP8 of 4 exponent bits.
    E4M3,
    /// FP8 of 5 exponent bits.
    E5M2,
    /// FP4, two to a byte.
    E2M1,
}

impl Dtype {
    const fn bits(self) -> usize {
        match self {
            Dtype::F32 => 32,
            Dtype::Bf16 => 16,
            Dtype::E4M3 | Dtype::E5M2 => 8,
            Dtype::E2M1 => 4,
        }
    }

    fn raw(self) -> sys::cudaDataType_t {
        match self {
            Dtype::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Dtype::F32 => sys::cudaDataType_t::CUDA_R_32F,
            Dtype::E4M3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
            Dtype::E5M2 => sys::cudaDataType_t::CUDA_R_8F_E5M2,
            Dtype::E2M1 => sys::cudaDataType_t::CUDA_R_4F_E2M1,
        }
    }
}

/// What the scales of an operand belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scale {
    /// No scales.
    None,
    /// One f32.
    Tensor,
    /// An f32 for each row.
    Rows,
    /// An f32 per 128 entries of a row along the contracted axis.
    Vec128,
    /// An f32 per 128x128.
    Square128,
    /// An E8M0 per 32 entries, swizzled.
    Vec32,
    /// An E4M3 per 16 entries, swizzled.
    Vec16,
}

impl Scale {
    /// The mode that cuBLASLt is told; one for a tensor is what it expects, and versions before 12.8 know of no other.
    fn mode(self) -> Option<sys::cublasLtMatmulMatrixScale_t> {
        use sys::cublasLtMatmulMatrixScale_t as Mode;
        match self {
            Scale::None | Scale::Tensor => None,
            Scale::Rows => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F),
            Scale::Vec128 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F),
            Scale::Square128 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F),
            Scale::Vec32 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0),
            Scale::Vec16 => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3),
        }
    }
}

/// An operand of a product: a row-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Side {
    /// Its entries.
    pub dtype: Dtype,
    /// Its scales.
    pub scale: Scale,
    /// Whether the contracted axis is the inner one of memory.
    pub k_inner: bool,
    /// Entries from one matrix of a batch to the next.
    pub stride: usize,
}

/// A product `out[rows, cols] = left[rows, k] right[k, cols]` of row-major matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of the left operand and of the result.
    pub rows: usize,
    /// Columns of the right operand and of the result.
    pub cols: usize,
    /// Length of the contracted axis.
    pub k: usize,
    /// The left operand.
    pub left: Side,
    /// The right operand.
    pub right: Side,
    /// Entries of the result.
    pub out: Dtype,
    /// Entries from one result of a batch to the next.
    pub out_stride: usize,
    /// Number of products.
    pub batch: usize,
    /// Whether a bf16 vector of `cols` entries is added to each row.
    pub bias: bool,
    /// Whether FP8 sums may stay in the tensor core's accumulator, which has fewer bits than f32.
    pub fast: bool,
    /// Whether the result's factor, and what becomes of what was there, are on the device.
    pub device_factors: bool,
}

/// What a product is multiplied by, and what becomes of what was there before it is added.
#[derive(Clone, Copy, Debug)]
pub enum Factors {
    /// The factor, and whether the product is added.
    Host(f32, bool),
    /// Addresses of two f32.
    Device([u64; 2]),
}

impl From<(f32, bool)> for Factors {
    fn from((alpha, accumulate): (f32, bool)) -> Self {
        Factors::Host(alpha, accumulate)
    }
}

impl Product {
    /// Bytes of one left operand, one right operand and one result; more than any memory has where the number does not fit.
    pub const fn bytes(&self) -> [usize; 3] {
        let Self { rows, cols, k, .. } = *self;
        [
            bytes(rows, k, self.left.dtype),
            bytes(cols, k, self.right.dtype),
            bytes(rows, cols, self.out),
        ]
    }

    /// Operands, result and sizes.
    pub fn describe(&self) -> String {
        let Self {
            rows,
            cols,
            k,
            left,
            right,
            out,
            batch,
            ..
        } = self;
        let times = if *batch > 1 {
            format!(", {batch} times")
        } else {
            String::new()
        };
        format!(
            "{:?} x {:?} to {out:?}, {rows}x{cols}x{k}{times}",
            left.dtype, right.dtype
        )
    }
}

const fn bytes(rows: usize, cols: usize, dtype: Dtype) -> usize {
    let entries = rows.saturating_mul(cols);
    match entries.checked_mul(dtype.bits()) {
        Some(bits) => bits.div_ceil(8),
        None => usize::MAX,
    }
}

/// Where an operand is: its entries, and its scales where it has such.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Address of its entries.
    pub data: u64,
    /// Address of its scales; 0 without.
    pub scale: u64,
}

impl Place {
    /// Of an operand without scales.
    pub fn values(data: u64) -> Self {
        Self { data, scale: 0 }
    }
}

/// The products of a stream. They hold no memory of the device.
#[derive(Debug)]
pub struct Matmuls {
    cuda: Cuda,
    handle: sys::cublasLtHandle_t,
    /// By what they are, by what addresses are multiples of, and by the bytes that they work in.
    planned: Mutex<HashMap<(Product, u32, usize), Planned>>,
}

// SAFETY: the handle may be used by any thread; what is planned is used under a lock.
unsafe impl Send for Matmuls {}
// SAFETY: as above.
unsafe impl Sync for Matmuls {}

/// cuBLASLt's descriptions of a product. Its columns are rows of ours, so the operands change sides.
#[derive(Debug)]
struct Planned {
    desc: sys::cublasLtMatmulDesc_t,
    /// Of our right operand, our left one, and the result.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: Option<sys::cublasLtMatmulAlgo_t>,
}

impl Drop for Planned {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; null ones were not made.
        unsafe {
            if !self.desc.is_null() {
                let _ = lt::destroy_matmul_desc(self.desc);
            }
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = lt::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Matmuls {
    /// No products yet.
    ///
    /// # Errors
    /// No cuBLASLt.
    pub fn new(cuda: &Cuda) -> Result<Self, MatmulError> {
        // SAFETY: loads the library, which has no precondition. Without this question cudarc would panic.
        if !unsafe { sys::is_culib_present() } {
            return Err(MatmulError::NoCublas);
        }
        let handle = cuda.foreign_work(
            || (),
            |_| lt::create_handle().map_err(failed("cublasLtCreate")),
        )?;
        Ok(Self {
            cuda: cuda.clone(),
            handle,
            planned: Mutex::default(),
        })
    }

    /// Gives the stream `out = alpha * left * right + beta * out`, with `bias` added to each row where the product has one. Sums are f32.
    ///
    /// # Errors
    /// cuBLASLt has no kernel for the product, or failed.
    ///
    /// # Safety
    /// The places, `out` and `bias` are those of matrices as `product` has them, in memory of the device that is not freed before work that
    /// the stream has by now, and so is a workspace of another library; of a product that is captured, not before its graph. Factors are where `product` says.
    pub unsafe fn run(
        &self,
        product: &Product,
        [left, right]: [Place; 2],
        out: u64,
        bias: u64,
        factors: Factors,
        workspace: &Workspace,
    ) -> Result<(), MatmulError> {
        let mut planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        let (alpha, beta) = match factors {
            Factors::Host(alpha, accumulate) => (alpha, f32::from(u8::from(accumulate))),
            Factors::Device(_) => (0.0, 0.0),
        };
        let [alpha, beta]: [*const c_void; 2] = match factors {
            Factors::Host(..) => [from_ref(&alpha).cast(), from_ref(&beta).cast()],
            Factors::Device(addresses) => addresses.map(|address| address as *const c_void),
        };
        // cuBLASLt takes a bias to be aligned as the result is.
        let alignment = alignment([left.data, right.data, out | bias]);
        let key = (*product, alignment, workspace.bytes);
        if planned.len() >= MOST && !planned.contains_key(&key) {
            planned.clear();
        }
        self.cuda.foreign_work(
            || workspace.owner.clone(),
            |stream| {
                let planned = match planned.entry(key) {
                    std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                    std::collections::hash_map::Entry::Vacant(new) => {
                        new.insert(Planned::new(product)?)
                    }
                };
                planned.set_places(product, left.scale, right.scale, bias)?;
                if planned.algorithm.is_none() {
                    let found =
                        planned.choose(self.handle, product, (workspace.bytes, alignment))?;
                    planned.algorithm = Some(found);
                }
                let algorithm = planned.algorithm.as_ref().map_or(null(), from_ref);
                let [a, b, d] = planned.layouts;
                // SAFETY: the caller's promise; descriptions live as long as `self`.
                let done = unsafe {
                    lt::matmul(
                        self.handle,
                        planned.desc,
                        alpha,
                        beta,
                        right.data as *const c_void,
                        a,
                        left.data as *const c_void,
                        b,
                        out as *const c_void,
                        d,
                        out as *mut c_void,
                        d,
                        algorithm,
                        workspace.pointer as *mut c_void,
                        workspace.bytes,
                        stream as sys::cudaStream_t,
                    )
                };
                Ok(done.map_err(failed("cublasLtMatmul"))?)
            },
        )
    }
}

/// What all addresses are multiples of, up to the 256 that cuBLASLt expects unless it is told otherwise.
fn alignment(addresses: [u64; 3]) -> u32 {
    let common = addresses.into_iter().fold(256, |all, one| all | one);
    1 << common.trailing_zeros()
}

impl Planned {
    fn new(product: &Product) -> Result<Self, KernelError> {
        let Product {
            rows,
            cols,
            k,
            left,
            right,
            out,
            out_stride,
            batch,
            bias,
            fast,
            device_factors,
        } = *product;
        let desc = lt::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        );
        let mut planned = Self {
            desc: desc.map_err(failed("cublasLtMatmulDescCreate"))?,
            layouts: [std::ptr::null_mut(); 3],
            algorithm: None,
        };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // A row-major [cols, k] is a column-major [k, cols], which is transposed to [cols, k].
        // `cublasOperation_t`: 0 as it is, 1 transposed.
        let turned = |turned: bool| i32::from(turned);
        planned.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSA,
            &turned(right.k_inner),
        )?;
        planned.set(
            Attribute::CUBLASLT_MATMUL_DESC_TRANSB,
            &turned(!left.k_inner),
        )?;
        if device_factors {
            let mode = sys::cublasLtPointerMode_t::CUBLASLT_POINTER_MODE_DEVICE;
            planned.set(Attribute::CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode)?;
        }
        if bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            planned.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            let dtype = Dtype::Bf16.raw();
            planned.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &dtype)?;
        }
        let fp8 = |side: Side| matches!(side.dtype, Dtype::E4M3 | Dtype::E5M2);
        if fp8(left) && fp8(right) {
            planned.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(fast))?;
        }
        let inner_outer = |side: Side, outer: usize| match side.k_inner {
            true => [k, outer],
            false => [outer, k],
        };
        let shapes = [
            (right.dtype, inner_outer(right, cols), right.stride),
            (left.dtype, inner_outer(left, rows), left.stride),
            (out, [cols, rows], out_stride),
        ];
        for (layout, (dtype, [inner, outer], stride)) in planned.layouts.iter_mut().zip(shapes) {
            let ld = i64::try_from(inner).unwrap_or(i64::MAX);
            let made = lt::create_matrix_layout(dtype.raw(), inner as u64, outer as u64, ld);
            *layout = made.map_err(failed("cublasLtMatrixLayoutCreate"))?;
            if batch > 1 {
                use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
                let count = i32::try_from(batch).unwrap_or(i32::MAX);
                let stride = i64::try_from(stride).unwrap_or(i64::MAX);
                // SAFETY: the layout was just made, and the values have the types of their attributes.
                let set = unsafe {
                    lt::set_matrix_layout_attribute(
                        *layout,
                        Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                        from_ref(&count).cast(),
                        size_of_val(&count),
                    )
                    .and_then(|()| {
                        lt::set_matrix_layout_attribute(
                            *layout,
                            Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                            from_ref(&stride).cast(),
                            size_of_val(&stride),
                        )
                    })
                };
                set.map_err(failed("cublasLtMatrixLayoutSetAttribute"))?;
            }
        }
        Ok(planned)
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), KernelError> {
        // SAFETY: the description was made, and callers give values of the type of the attribute.
        let set = unsafe {
            lt::set_matmul_desc_attribute(
                self.desc,
                attribute,
                from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        set.map_err(failed("cublasLtMatmulDescSetAttribute"))
    }

    /// Where scales and the bias are.
    fn set_places(
        &self,
        product: &Product,
        left: u64,
        right: u64,
        bias: u64,
    ) -> Result<(), KernelError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if let Some(mode) = product.right.scale.mode() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode)?;
        }
        if let Some(mode) = product.left.scale.mode() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode)?;
        }
        if product.right.scale != Scale::None {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &right)?;
        }
        if product.left.scale != Scale::None {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &left)?;
        }
        if product.bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        Ok(())
    }

    /// cuBLASLt's first choice within so many bytes of workspace, for addresses that are multiples of `alignment`.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        product: &Product,
        (workspace, alignment): (usize, u32),
    ) -> Result<sys::cublasLtMatmulAlgo_t, MatmulError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference =
            lt::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?;
        let [a, b, d] = self.layouts;
        let alignments = [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        // SAFETY: all descriptions are alive; values have the types of their attributes; the preference is destroyed behind its last use.
        let found = unsafe {
            let set = |attribute, value: *const c_void, bytes| {
                lt::set_matmul_pref_attribute(preference, attribute, value, bytes)
            };
            let aligned = || {
                alignments.into_iter().try_for_each(|attribute| {
                    set(attribute, from_ref(&alignment).cast(), size_of::<u32>())
                })
            };
            let most = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let room = set(most, from_ref(&workspace).cast(), size_of::<usize>());
            let found = room.and_then(|()| aligned()).and_then(|()| {
                lt::get_matmul_algo_heuristic(handle, self.desc, a, b, d, d, preference)
            });
            let _ = lt::destroy_matmul_pref(preference);
            found
        };
        found
            .map(|found| found.algo)
            .map_err(|error| MatmulError::NoProduct {
                product: product.describe(),
                alignment,
                why: format!("{:?}", error.0),
            })
    }
}

impl Drop for Matmuls {
    fn drop(&mut self) {
        self.planned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        let handle = self.handle;
        self.cuda.free_foreign(|| {
            // SAFETY: made once, destroyed once. Nobody is left to hear of one that stays.
            let _ = unsafe { lt::destroy_handle(handle) };
        });
    }
}

fn failed(call: &'static str) -> impl Fn(CublasError) -> KernelError {
    move |error| KernelError::Device {
        call,
        why: format!("{:?}", error.0),
    }
}

#[cfg(test)]
mod tests {
    use super::{Dtype, Product, Scale, Side, alignment};

    #[test]
    fn bytes_are_those_of_the_sides() {
        let side = |dtype| Side {
            dtype,
            scale: Scale::Tensor,
            k_inner: true,
            stride: 0,
        };
        let product = Product {
            rows: 3,
            cols: 5,
            k: 7,
            left: side(Dtype::E4M3),
            right: side(Dtype::E2M1),
            out: Dtype::Bf16,
            out_stride: 0,
            batch: 1,
            bias: false,
            fast: false,
            device_factors: false,
        };
        assert_eq!(product.bytes(), [21, 18, 30]);
    }

    #[test]
    fn an_alignment_is_that_of_the_worst_address_and_at_most_256() {
        assert_eq!(alignment([512, 0x7000, 256]), 256);
        assert_eq!(alignment([512, 0x7010, 256]), 16);
        assert_eq!(alignment([512, 0x7010, 257]), 1);
        assert_eq!(alignment([0, 0, 0]), 256);
    }
}
