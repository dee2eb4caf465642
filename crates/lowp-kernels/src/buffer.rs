//! [`DeviceBuffer`]: what every backend's buffers can do by themselves.

use std::fmt::Debug;

use crate::{Element, KernelError};

/// A shared handle on memory of fixed length. Cloning clones the handle, not the content.
pub trait DeviceBuffer<T: Element>: Clone + Debug + Send + Sync + 'static {
    /// Number of entries.
    fn len(&self) -> usize;

    /// Whether there are no entries.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The content after all work that the device was given so far, whatever the stream. Waits for that work.
    /// [`crate::Backend::download`] waits for one stream only.
    ///
    /// # Errors
    /// The device failed, or the host has no room.
    fn to_vec(&self) -> Result<Vec<T>, KernelError>;
}
