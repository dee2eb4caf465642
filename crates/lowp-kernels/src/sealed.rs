//! What keeps the set of backends closed (docs/decisions/0012-backends-are-ours.md). Not part of the API:
//! only crates of this workspace implement it.

/// A backend of this workspace.
pub trait Backend {}
