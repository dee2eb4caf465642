//! [`Torch`]: the C functions of PyTorch that operators call, and [`Tensor`], a handle of one of its tensors.

#![expect(unsafe_code, reason = "calls C functions that are found at run time")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use crate::error::Error;

type RawTensor = *mut c_void;
type RawLibrary = *mut c_void;
/// Not 0 where a call failed.
type Code = i32;
/// What PyTorch calls for an operator: its arguments, which are overwritten by its results, and how many there are of both.
pub(crate) type Kernel = unsafe extern "C-unwind" fn(*mut u64, u64, u64);

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: $type:ty,)*) => {
        /// PyTorch's C functions.
        #[derive(Debug)]
        pub(crate) struct Torch {
            $($(#[$doc])* $field: $type,)*
        }

        impl Torch {
            /// Finds them in the libraries.
            fn find(libraries: &[Library]) -> Result<Self, Error> {
                Ok(Self {
                    // SAFETY: the type is that of the function in PyTorch's header, or in that of the C++ library.
                    $($field: unsafe { std::mem::transmute::<*mut c_void, $type>(symbol(libraries, $symbol)?) },)*
                })
            }
        }
    };
}

functions! {
    data_ptr = c"aoti_torch_get_data_ptr": unsafe extern "C" fn(RawTensor, *mut *mut c_void) -> Code,
    storage_size = c"aoti_torch_get_storage_size": unsafe extern "C" fn(RawTensor, *mut i64) -> Code,
    dim = c"aoti_torch_get_dim": unsafe extern "C" fn(RawTensor, *mut i64) -> Code,
    sizes = c"aoti_torch_get_sizes": unsafe extern "C" fn(RawTensor, *mut *const i64) -> Code,
    dtype = c"aoti_torch_get_dtype": unsafe extern "C" fn(RawTensor, *mut i32) -> Code,
    device_index = c"aoti_torch_get_device_index": unsafe extern "C" fn(RawTensor, *mut i32) -> Code,
    device_type = c"aoti_torch_get_device_type": unsafe extern "C" fn(RawTensor, *mut i32) -> Code,
    is_contiguous = c"aoti_torch_is_contiguous": unsafe extern "C" fn(RawTensor, *mut bool) -> Code,
    empty_strided = c"aoti_torch_empty_strided":
        unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut RawTensor) -> Code,
    copy = c"aoti_torch_copy_": unsafe extern "C" fn(RawTensor, RawTensor, i32) -> Code,
    delete = c"aoti_torch_delete_tensor_object": unsafe extern "C" fn(RawTensor) -> Code,
    stream = c"aoti_torch_get_current_cuda_stream": unsafe extern "C" fn(i32, *mut *mut c_void) -> Code,
    cpu = c"aoti_torch_device_type_cpu": unsafe extern "C" fn() -> i32,
    cuda = c"aoti_torch_device_type_cuda": unsafe extern "C" fn() -> i32,
    e4m3 = c"aoti_torch_dtype_float8_e4m3fn": unsafe extern "C" fn() -> i32,
    e5m2 = c"aoti_torch_dtype_float8_e5m2": unsafe extern "C" fn() -> i32,
    bf16 = c"aoti_torch_dtype_bfloat16": unsafe extern "C" fn() -> i32,
    f32 = c"aoti_torch_dtype_float32": unsafe extern "C" fn() -> i32,
    u8 = c"aoti_torch_dtype_uint8": unsafe extern "C" fn() -> i32,
    i64 = c"aoti_torch_dtype_int64": unsafe extern "C" fn() -> i32,
    library = c"aoti_torch_library_init_impl":
        unsafe extern "C" fn(*const c_char, *const c_char, *const c_char, u32, *mut RawLibrary) -> Code,
    implement = c"aoti_torch_library_impl": unsafe extern "C" fn(RawLibrary, *const c_char, Kernel) -> Code,
    /// `std::__throw_runtime_error`: an operator fails by a C++ exception, which PyTorch turns into one of Python.
    throw = c"_ZSt21__throw_runtime_errorPKc": unsafe extern "C-unwind" fn(*const c_char) -> !,
}

/// The functions, once [`load`] has found them.
static TORCH: OnceLock<Torch> = OnceLock::new();

/// Finds PyTorch's functions in its folder of libraries. Fails where a version has them not.
pub(crate) fn load(folder: &Path) -> Result<&'static Torch, Error> {
    if let Some(torch) = TORCH.get() {
        return Ok(torch);
    }
    let paths = ["libtorch_cpu.so", "libtorch_cuda.so"].map(|name| folder.join(name));
    let names = paths.iter().map(|path| path.to_string_lossy().into_owned());
    let libraries = names
        .chain(["libstdc++.so.6".to_owned()])
        .map(|name| Library::loaded(&name))
        .collect::<Result<Vec<_>, _>>()?;
    let torch = Torch::find(&libraries)?;
    Ok(TORCH.get_or_init(|| torch))
}

/// The functions that [`load`] found: operators are registered after that.
pub(crate) fn torch() -> Result<&'static Torch, Error> {
    TORCH
        .get()
        .ok_or_else(|| Error::new("PyTorch's C functions are not loaded"))
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, symbol: *const c_char) -> *mut c_void;
}

/// A library that the process has loaded. It stays so for as long as the process.
#[derive(Debug)]
struct Library(*mut c_void);

impl Library {
    fn loaded(name: &str) -> Result<Self, Error> {
        const RTLD_NOW: c_int = 2;
        const RTLD_NOLOAD: c_int = 4;
        let text = c_string(name);
        // SAFETY: the name ends with a zero.
        let found = unsafe { dlopen(text.as_ptr(), RTLD_NOW | RTLD_NOLOAD) };
        if found.is_null() {
            return Err(Error::new(format!("the process has not loaded {name}")));
        }
        Ok(Self(found))
    }
}

fn symbol(libraries: &[Library], name: &CStr) -> Result<*mut c_void, Error> {
    let find = |library: &Library| {
        // SAFETY: the library is open, the name ends with a zero.
        let found = unsafe { dlsym(library.0, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    };
    let found = libraries.iter().find_map(find);
    found.ok_or_else(|| {
        Error::new(format!(
            "PyTorch has no function {}",
            name.to_string_lossy()
        ))
    })
}

/// Text for C, up to its first zero.
fn c_string(text: &str) -> CString {
    let bytes = text
        .bytes()
        .take_while(|&byte| byte != 0)
        .collect::<Vec<_>>();
    CString::new(bytes).unwrap_or_default()
}

fn checked(code: Code, call: &str) -> Result<(), Error> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::new(format!(
        "{call} of PyTorch failed; its message is on stderr"
    )))
}

/// What a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    E4M3,
    E5M2,
    Bf16,
    F32,
    Bytes,
}

impl Torch {
    /// PyTorch's number of a dtype.
    fn number(&self, holds: Holds) -> i32 {
        let number = match holds {
            Holds::E4M3 => self.e4m3,
            Holds::E5M2 => self.e5m2,
            Holds::Bf16 => self.bf16,
            Holds::F32 => self.f32,
            Holds::Bytes => self.u8,
        };
        // SAFETY: returns a constant.
        unsafe { number() }
    }

    /// Memory without content on a GPU, of contiguous rows.
    pub(crate) fn empty(
        &self,
        sides: &[usize],
        holds: Holds,
        device: i32,
    ) -> Result<Tensor, Error> {
        let mut sizes = [0; 2];
        let mut strides = [1; 2];
        for (size, &side) in sizes.iter_mut().zip(sides) {
            *size = i64::try_from(side).map_err(|_| {
                Error::new(format!("a side of {side}; PyTorch counts to {}", i64::MAX))
            })?;
        }
        if sides.len() == 2 {
            strides[0] = sizes[1].max(1);
        }
        let dims = i64::try_from(sides.len()).unwrap_or(i64::MAX);
        let mut made = std::ptr::null_mut();
        // SAFETY: sizes and strides have as many entries as dimensions, two at most.
        let code = unsafe {
            (self.empty_strided)(
                dims,
                sizes.as_ptr(),
                strides.as_ptr(),
                self.number(holds),
                (self.cuda)(),
                device,
                &raw mut made,
            )
        };
        if code != 0 {
            let bytes = sides.iter().product::<usize>();
            return Err(Error::new(format!(
                "CUDA out of memory. PyTorch could not allocate {sides:?} entries ({bytes} in all) for a layer on GPU {device}; its message is on stderr"
            )));
        }
        Ok(Tensor(made))
    }

    /// The current stream of a GPU, a `CUstream`.
    pub(crate) fn stream(&self, device: i32) -> Result<u64, Error> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes the stream.
        let code = unsafe { (self.stream)(device, &raw mut stream) };
        checked(code, "get_current_cuda_stream")?;
        Ok(stream as u64)
    }

    /// Has PyTorch call `kernel` for the operator `lowp::name` of tensors of a dispatch key.
    pub(crate) fn register(&self, name: &CStr, key: &CStr, kernel: Kernel) -> Result<(), Error> {
        let mut library = std::ptr::null_mut();
        // SAFETY: the strings end with zeros and are constants; the registration lives as long as the library object, which is not deleted.
        unsafe {
            checked(
                (self.library)(
                    c"lowp".as_ptr(),
                    key.as_ptr(),
                    c"lowp".as_ptr(),
                    0,
                    &raw mut library,
                ),
                "library_init_impl",
            )?;
            checked(
                (self.implement)(library, name.as_ptr(), kernel),
                "library_impl",
            )
        }
    }

    /// Fails an operator: a C++ exception with a text.
    pub(crate) fn throw(&self, text: &str) -> ! {
        let text = c_string(text);
        // SAFETY: the exception copies the text. It leaves through functions that say so (`C-unwind`).
        unsafe { (self.throw)(text.as_ptr()) }
    }
}

/// A tensor of PyTorch, which lives as long as its last handle.
#[derive(Debug)]
pub(crate) struct Tensor(RawTensor);

// SAFETY: PyTorch's tensors may be used and freed by any thread; nothing here changes one that others have.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Drop for Tensor {
    fn drop(&mut self) {
        if let Some(torch) = TORCH.get() {
            // SAFETY: the only owner of the handle.
            let _freed = unsafe { (torch.delete)(self.0) };
        }
    }
}

impl Tensor {
    /// The tensor of an argument.
    ///
    /// # Safety
    /// The argument is a tensor, and nobody else takes it.
    pub(crate) unsafe fn of_argument(argument: u64) -> Self {
        Self(argument as RawTensor)
    }

    /// The tensor as a result, which PyTorch owns from then on.
    pub(crate) fn into_result(self) -> u64 {
        let raw = self.0 as u64;
        std::mem::forget(self);
        raw
    }

    /// Whether its memory was freed, as FSDP2 frees gathered parameters.
    pub(crate) fn is_freed(&self) -> Result<bool, Error> {
        let mut bytes = 0;
        // SAFETY: the handle is alive; so for all of these methods.
        let code = unsafe { (torch()?.storage_size)(self.0, &raw mut bytes) };
        checked(code, "get_storage_size")?;
        Ok(bytes == 0)
    }

    /// Where its values lie.
    pub(crate) fn address(&self) -> Result<u64, Error> {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: as above.
        let code = unsafe { (torch()?.data_ptr)(self.0, &raw mut pointer) };
        checked(code, "get_data_ptr")?;
        Ok(pointer as u64)
    }

    /// The length of each dimension.
    fn shape(&self) -> Result<&[i64], Error> {
        let torch = torch()?;
        let (mut dim, mut sizes) = (0, std::ptr::null());
        // SAFETY: as above; the sizes are as many as the dimensions, and live as long as the tensor. Those of a scalar may be null.
        unsafe {
            checked((torch.dim)(self.0, &raw mut dim), "get_dim")?;
            checked((torch.sizes)(self.0, &raw mut sizes), "get_sizes")?;
            match usize::try_from(dim) {
                Ok(dim) if dim > 0 => Ok(std::slice::from_raw_parts(sizes, dim)),
                _ => Ok(&[]),
            }
        }
    }

    /// Its rows and columns.
    pub(crate) fn sides(&self) -> Result<[usize; 2], Error> {
        match self.shape()? {
            &[rows, cols] => Ok([rows, cols].map(|size| usize::try_from(size).unwrap_or(0))),
            other => Err(Error::new(format!(
                "a tensor of {} dimensions as an operand of a layer; it takes matrices",
                other.len()
            ))),
        }
    }

    /// How many values it has.
    pub(crate) fn entries(&self) -> Result<usize, Error> {
        let lengths = self.shape()?.iter();
        Ok(lengths
            .map(|&length| usize::try_from(length).unwrap_or(0))
            .product())
    }

    /// PyTorch's number of its dtype.
    fn dtype(&self) -> Result<i32, Error> {
        let mut dtype = 0;
        // SAFETY: as above.
        let code = unsafe { (torch()?.dtype)(self.0, &raw mut dtype) };
        checked(code, "get_dtype")?;
        Ok(dtype)
    }

    /// What it holds.
    pub(crate) fn holds(&self) -> Result<Holds, Error> {
        let (torch, dtype) = (torch()?, self.dtype()?);
        let all = [
            Holds::Bf16,
            Holds::F32,
            Holds::E4M3,
            Holds::E5M2,
            Holds::Bytes,
        ];
        let found = all.into_iter().find(|&holds| torch.number(holds) == dtype);
        found.ok_or_else(|| {
            Error::new("an operand of a layer is not of bfloat16, float32 or codes; cast it")
        })
    }

    /// PyTorch's number of the kind of its device.
    fn device_type(&self) -> Result<i32, Error> {
        let mut kind = 0;
        // SAFETY: as above.
        let code = unsafe { (torch()?.device_type)(self.0, &raw mut kind) };
        checked(code, "get_device_type")?;
        Ok(kind)
    }

    /// The number of its GPU.
    pub(crate) fn device(&self) -> Result<i32, Error> {
        let torch = torch()?;
        // SAFETY: returns a constant.
        if self.device_type()? != unsafe { (torch.cuda)() } {
            return Err(Error::new(
                "an operand of a layer is not on a GPU, as its weight is; move both to one device",
            ));
        }
        let mut index = 0;
        // SAFETY: as above.
        let code = unsafe { (torch.device_index)(self.0, &raw mut index) };
        checked(code, "get_device_index")?;
        Ok(index)
    }

    /// Whether its rows follow each other.
    fn is_contiguous(&self) -> Result<bool, Error> {
        let mut is_contiguous = false;
        // SAFETY: as above.
        let code = unsafe { (torch()?.is_contiguous)(self.0, &raw mut is_contiguous) };
        checked(code, "is_contiguous")?;
        Ok(is_contiguous)
    }

    /// Fails unless its values follow each other on a GPU.
    pub(crate) fn check_place(&self, device: i32) -> Result<(), Error> {
        let found = self.device()?;
        if found != device {
            return Err(Error::new(format!(
                "an operand of a layer is on GPU {found} and another one on GPU {device}; move both to one device"
            )));
        }
        match self.is_contiguous()? {
            true => Ok(()),
            false => Err(Error::new(
                "codes or scales of a layer are not contiguous; call .contiguous()",
            )),
        }
    }

    /// Where it lies as a bias of so many columns, in bfloat16 on a GPU.
    pub(crate) fn bias(&self, width: usize, device: i32) -> Result<u64, Error> {
        let torch = torch()?;
        let (mut dim, mut sizes) = (0, std::ptr::null());
        // SAFETY: as above.
        let len = unsafe {
            checked((torch.dim)(self.0, &raw mut dim), "get_dim")?;
            checked((torch.sizes)(self.0, &raw mut sizes), "get_sizes")?;
            if dim == 1 { *sizes } else { -1 }
        };
        let fits =
            usize::try_from(len).is_ok_and(|len| len == width) && self.holds()? == Holds::Bf16;
        if !fits || self.device()? != device || !self.is_contiguous()? || self.is_freed()? {
            return Err(Error::new(format!(
                "the bias of a layer is not {width} contiguous values of bfloat16 on GPU {device}, where its weight is, or its memory is gone; give such a bias, and use \
                 what FSDP2 gathered before it is freed"
            )));
        }
        self.address()
    }

    /// The number in a tensor of one integer on the host.
    pub(crate) fn token(&self) -> Result<i64, Error> {
        let torch = torch()?;
        // SAFETY: returns constants.
        let (cpu, i64) = unsafe { ((torch.cpu)(), (torch.i64)()) };
        let address = self.address()? as *const i64;
        if self.device_type()? != cpu
            || self.dtype()? != i64
            || self.entries()? != 1
            || address.is_null()
        {
            return Err(Error::new(
                "the number of a layer is not one integer of 64 bits on the CPU",
            ));
        }
        // SAFETY: it was checked that one lies there; it lives as long as the handle.
        Ok(unsafe { *address })
    }

    /// The same with rows that follow each other.
    pub(crate) fn contiguous(self) -> Result<Self, Error> {
        if self.is_contiguous()? {
            return Ok(self);
        }
        let torch = torch()?;
        let copy = torch.empty(&self.sides()?, self.holds()?, self.device()?)?;
        // SAFETY: both handles are alive, and the shapes are equal.
        checked(unsafe { (torch.copy)(copy.0, self.0, 0) }, "copy_")?;
        Ok(copy)
    }
}
