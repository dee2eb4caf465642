//! [`Matmuls`]: products by cuBLASLt, each planned once.

#![expect(unsafe_code, reason = "calls cuBLASLt")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{from_ref, null};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys;
use lowp_kernels::{Cuda, CudaBuffer, KernelError};

use super::TransformerError;
use super::place::Arena;
use super::trace::Trace;

/// Bytes that products may work in.
const WORKSPACE: usize = 64 << 20;

/// What a matrix holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Dtype {
    Bf16,
    F32,
    E4M3,
    E5M2,
    E2M1,
}

impl Dtype {
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

/// What the scales of an operand belong to: f32, but for `Vec32` (E8M0) and `Vec16` (E4M3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scale {
    None,
    Tensor,
    Rows,
    Vec128,
    Square128,
    Vec32,
    Vec16,
}

impl Scale {
    fn mode(self) -> Option<sys::cublasLtMatmulMatrixScale_t> {
        use sys::cublasLtMatmulMatrixScale_t as Mode;
        match self {
            Scale::None => None,
            Scale::Tensor => Some(Mode::CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F),
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
pub(super) struct Side {
    pub(super) dtype: Dtype,
    pub(super) scale: Scale,
    /// Whether the contracted axis is the inner one of memory.
    pub(super) k_inner: bool,
    /// Entries from one matrix of a batch to the next.
    pub(super) stride: usize,
}

/// A product `out[rows, cols] = left[rows, k] right[k, cols]` of row-major matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) k: usize,
    pub(super) left: Side,
    pub(super) right: Side,
    pub(super) out: Dtype,
    pub(super) out_stride: usize,
    pub(super) batch: usize,
    /// Whether FP8 sums may stay in the tensor core's accumulator, which has fewer bits than f32.
    pub(super) fast: bool,
    /// Whether the result's factor, and what becomes of what was there, are on the device.
    pub(super) device_factors: bool,
}

/// What a product is multiplied by, and what becomes of what was there before it is added.
#[derive(Clone, Copy, Debug)]
pub(super) enum Factors {
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
    /// Operands, result and sizes.
    fn describe(&self) -> String {
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

/// Where an operand is: its entries, and its scales where it has such.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) data: u64,
    pub(super) scale: u64,
    /// The amax of two-level scales, which products leave to [`Factors`].
    pub(super) amax: u64,
}

impl Place {
    /// Of an operand without scales.
    pub(super) fn values(data: u64) -> Self {
        Self {
            data,
            scale: 0,
            amax: 0,
        }
    }
}

/// The products of a stream.
#[derive(Debug)]
pub(super) struct Matmuls {
    cuda: Cuda,
    handle: sys::cublasLtHandle_t,
    workspace: CudaBuffer<u8>,
    trace: Arc<Trace>,
    planned: Mutex<HashMap<Product, Planned>>,
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
    pub(super) fn new(
        cuda: &Cuda,
        arena: &Arena,
        trace: &Arc<Trace>,
    ) -> Result<Self, TransformerError> {
        // SAFETY: loads the library, which has no precondition. Without this question cudarc would panic.
        if !unsafe { sys::is_culib_present() } {
            return Err(TransformerError::NoCublas);
        }
        let workspace = arena.own(WORKSPACE)?;
        let handle = cuda.foreign_work(
            || (),
            |_| lt::create_handle().map_err(failed("cublasLtCreate")),
        )?;
        Ok(Self {
            cuda: cuda.clone(),
            handle,
            workspace,
            trace: Arc::clone(trace),
            planned: Mutex::default(),
        })
    }

    /// Gives the stream `out = alpha * left * right + beta * out`.
    ///
    /// # Safety
    /// The places are those of operands as `product` has them, in memory of the device that is not freed before work that the stream has
    /// by now. Factors are where `product` says.
    pub(super) unsafe fn run(
        &self,
        product: &Product,
        [left, right]: [Place; 2],
        out: u64,
        factors: impl Into<Factors>,
    ) -> Result<(), TransformerError> {
        let mut planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        let factors = factors.into();
        let (alpha, beta) = match factors {
            Factors::Host(alpha, accumulate) => (alpha, f32::from(u8::from(accumulate))),
            Factors::Device(_) => (0.0, 0.0),
        };
        let [alpha, beta]: [*const c_void; 2] = match factors {
            Factors::Host(..) => [from_ref(&alpha).cast(), from_ref(&beta).cast()],
            Factors::Device(addresses) => addresses.map(|address| address as *const c_void),
        };
        self.cuda.foreign_work::<_, _, TransformerError>(
            || (),
            |stream| {
                let planned = match planned.entry(*product) {
                    std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
                    std::collections::hash_map::Entry::Vacant(new) => {
                        new.insert(Planned::new(product)?)
                    }
                };
                planned.set_scales(product, left.scale, right.scale)?;
                if planned.algorithm.is_none() {
                    planned.algorithm = Some(planned.choose(self.handle, product)?);
                }
                let algorithm = planned.algorithm.as_ref().map_or(null(), from_ref);
                let [a, b, d] = planned.layouts;
                // SAFETY: the caller's promise; descriptions and workspace live as long as `self`.
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
                        self.workspace.pointer() as *mut c_void,
                        WORKSPACE,
                        stream as sys::cudaStream_t,
                    )
                };
                Ok(done.map_err(failed("cublasLtMatmul"))?)
            },
        )?;
        Ok(self.trace.mark(|| product.describe())?)
    }
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

    fn set_scales(&self, product: &Product, left: u64, right: u64) -> Result<(), KernelError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if let Some(mode) = product.right.scale.mode() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &right)?;
        }
        if let Some(mode) = product.left.scale.mode() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &left)?;
        }
        Ok(())
    }

    /// cuBLASLt's first choice.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        product: &Product,
    ) -> Result<sys::cublasLtMatmulAlgo_t, TransformerError> {
        let preference =
            lt::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?;
        let [a, b, d] = self.layouts;
        // SAFETY: all descriptions are alive; the preference is destroyed behind its last use.
        let found = unsafe {
            let set = lt::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                from_ref(&WORKSPACE).cast(),
                size_of::<usize>(),
            );
            let found = set.and_then(|()| {
                lt::get_matmul_algo_heuristic(handle, self.desc, a, b, d, d, preference)
            });
            let _ = lt::destroy_matmul_pref(preference);
            found
        };
        found
            .map(|found| found.algo)
            .map_err(|error| TransformerError::NoProduct {
                product: product.describe(),
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
        // SAFETY: made once, destroyed once.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

fn failed(call: &'static str) -> impl Fn(CublasError) -> KernelError {
    move |error| KernelError::Device {
        call,
        why: format!("{:?}", error.0),
    }
}
