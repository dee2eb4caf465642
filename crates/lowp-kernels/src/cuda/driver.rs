//! Errors of the driver.

use cudarc::driver::DriverError;

use crate::KernelError;

/// Names the driver call that failed.
pub(super) fn failed(call: &'static str) -> impl Fn(DriverError) -> KernelError {
    move |error| {
        let text = |text: Result<&std::ffi::CStr, _>| {
            text.map_or("unknown error".to_owned(), |text: &std::ffi::CStr| {
                text.to_string_lossy().into_owned()
            })
        };
        let why = format!(
            "{} ({})",
            text(error.error_string()),
            text(error.error_name())
        );
        KernelError::Device { call, why }
    }
}
