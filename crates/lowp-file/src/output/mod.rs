//! Output paths: known to be writable before work begins, and whole or absent after it.

pub(crate) mod background;
pub(crate) mod path;
pub(crate) mod resolve;
pub(crate) mod unpublished;
