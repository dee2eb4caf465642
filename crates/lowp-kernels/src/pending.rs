//! [`Pending`]: values on their way from a device to the host.

use std::fmt;

use crate::KernelError;

/// Values on their way from a device to the host ([`crate::Backend::start_read`]).
pub struct Pending<T> {
    arrival: Box<dyn Arrival<T>>,
}

/// What a backend knows of values on their way.
pub(crate) trait Arrival<T>: Send + Sync {
    /// The values, as soon as they are there.
    fn wait(self: Box<Self>) -> Result<Vec<T>, KernelError>;
}

impl<T> Arrival<T> for Vec<T>
where
    T: Send + Sync,
{
    fn wait(self: Box<Self>) -> Result<Vec<T>, KernelError> {
        Ok(*self)
    }
}

impl<T> Pending<T> {
    pub(crate) fn new(arrival: impl Arrival<T> + 'static) -> Self {
        let arrival = Box::new(arrival);
        Self { arrival }
    }

    /// The values. Waits until they are there.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(self) -> Result<Vec<T>, KernelError> {
        self.arrival.wait()
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}
