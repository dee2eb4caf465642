//! Regular files that are read or written whole.

use crate::limits::no_room;
pub use crate::limits::with_remedy;
use crate::output::unpublished::Unpublished;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

pub use crate::output::resolve::resolve;

/// Writes `contents` to a temporary name next to `path`, syncs it and renames it into place. It has the permissions of a file that it replaces,
/// and belongs to who runs the program.
///
/// # Errors
/// If the file cannot be created, written or renamed; nothing is left then.
pub fn write_atomically(path: &Path, contents: &str) -> io::Result<()> {
    let new = Unpublished::file(path)?;
    let mut out = new.create()?;
    let written = out.write_all(contents.as_bytes());
    written.map_err(|error| no_room(error, &out))?;
    out.sync_all()?;
    new.publish()
}

/// Copies the contents of `from` in the same way to the file `to`, which has modes of its own.
///
/// # Errors
/// If `from` cannot be read, or as above.
pub fn copy_atomically(from: &Path, to: &Path) -> io::Result<()> {
    let (mut contents, _) = open_regular(from)?;
    let new = Unpublished::file(to)?;
    let mut out = new.create()?;
    let written = io::copy(&mut contents, &mut out);
    written.map_err(|error| no_room(error, &out))?;
    out.sync_all()?;
    new.publish()
}

/// Finds out whether [`write_atomically`] could write `path` now.
///
/// # Errors
/// `path` is no file name, or `-`; it exists as something else than a regular file, or lies in a folder that is
/// missing or cannot be written.
pub fn check_writable(path: &Path) -> io::Result<()> {
    Unpublished::file(path).map(drop)
}

/// Whether `path`, which need not be there, lies in the folder `folder`, also by links.
pub fn lies_below(path: &Path, folder: &Path) -> bool {
    let Ok(folder) = folder.canonicalize() else {
        return false;
    };
    let there = path.ancestors().find_map(|above| {
        let is_here = above.as_os_str().is_empty();
        let above = if is_here { Path::new(".") } else { above };
        above.canonicalize().ok()
    });
    folder.is_dir() && there.is_some_and(|there| there.starts_with(&folder))
}

/// Opens a regular file for reading and tells its length. A pipe, whose writer may never come, or a device, which may
/// never end, is an error and is not waited for.
pub(crate) fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    let regular = |data: &fs::Metadata| match data.file_type() {
        kind if kind.is_file() => Ok(()),
        kind if kind.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        _ => Err(io::Error::other(
            "a pipe or a device and no regular file; write what it gives to a file first",
        )),
    };
    // Opening alone does something to some devices, such as a tape.
    regular(&fs::metadata(path)?)?;
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK);
    }
    let file = options.open(path)?;
    // It may be another one by now.
    let data = file.metadata()?;
    regular(&data)?;
    Ok((file, data.len()))
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// There is no such file, it cannot be read, or it is no regular file; it is longer, or there is no memory for it.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, length) = open_regular(path)?;
    if length > limit {
        return Err(io::Error::other(format!(
            "{length} bytes, and at most {limit} are read into memory; give a shorter file"
        )));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(length).unwrap_or(usize::MAX);
    bytes
        .try_reserve_exact(room)
        .map_err(|_| io::Error::other(format!("there is no memory for its {length} bytes")))?;
    // One that grows meanwhile is read as far as it was.
    file.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_a_file_and_leaves_nothing_else() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("out.json");
        drop(Unpublished::file(&path)?);
        assert_eq!(fs::read_dir(dir.path())?.count(), 0);
        write_atomically(&path, "one")?;
        drop(Unpublished::file(&path)?);
        write_atomically(&path, "two")?;
        assert_eq!(fs::read_to_string(&path)?, "two");
        assert_eq!(fs::read_dir(dir.path())?.count(), 1);
        assert!(write_atomically(dir.path(), "").is_err());
        Ok(())
    }

    /// As in the cache of a hub, whose files are read-only.
    #[test]
    fn a_read_only_file_is_copied_twice() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
        for contents in ["first", "second"] {
            fs::write(&from, contents)?;
            let writable = fs::metadata(&from)?.permissions();
            let mut read_only = writable.clone();
            read_only.set_readonly(true);
            fs::set_permissions(&from, read_only)?;
            copy_atomically(&from, &to)?;
            assert_eq!(fs::read_to_string(&to)?, contents);
            assert!(!fs::metadata(&to)?.permissions().readonly());
            fs::set_permissions(&from, writable)?;
        }
        assert_eq!(fs::read_dir(dir.path())?.count(), 2);
        Ok(())
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_a_link() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old")?;
        std::os::unix::fs::symlink(&file, &link)?;
        write_atomically(&link, "new")?;
        assert!(fs::symlink_metadata(&link)?.is_symlink());
        assert_eq!(fs::read_to_string(&file)?, "new");
        Ok(())
    }
}
