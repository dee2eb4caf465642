//! [`Unpublished`]: a file or a folder that is either whole or absent, and known to be writable before hours of work.
//!
//! What replaces a file has the permissions of that file. Its owner is who runs the command.

use super::resolve::resolve;
use crate::limits::{hinted, is_descriptors};
use crate::process;
use crate::temporary::Temporary;
use lowp_checkpoint::sync_folder;
use std::fs::{self, File, Permissions};
use std::io;
use std::path::{Path, PathBuf};

/// A file or a folder that does not have its name yet.
#[derive(Debug)]
pub(crate) struct Unpublished {
    path: PathBuf,
    temporary: Temporary,
    is_folder: bool,
    /// Of the file or the empty folder that it replaces.
    permissions: Option<Permissions>,
}

impl Unpublished {
    /// A file that will be at `path`, or replace the one that is there.
    pub(crate) fn file(path: &Path) -> io::Result<Self> {
        if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(io::Error::other(
                "it ends as a folder does; give the name of a file",
            ));
        }
        let path = named(path, "file")?;
        // A rename would replace a device or a pipe by a file.
        if fs::metadata(&path).is_ok_and(|data| !data.is_file()) {
            return Err(io::Error::other(
                "it exists and is no regular file; give another name",
            ));
        }
        Self::next_to(path, false)
    }

    /// A folder that will be at `path`, where there is none or an empty one now.
    pub(crate) fn folder(path: &Path) -> io::Result<Self> {
        let path = named(path, "folder")?;
        let why = match fs::read_dir(&path).map(|entries| entries.count()) {
            Ok(0) if is_mount(&path) => {
                "another file system is mounted there, whose folder cannot be replaced; give the name of a folder in it"
            }
            Ok(1..) => "the folder is not empty; give another name or empty it",
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                "it exists and is no folder; give another name"
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {
                let new = Self::next_to(path, true)?;
                if let Some(permissions) = &new.permissions {
                    // Its files are hidden from whom the folder will hide them; its owner must be able to write them.
                    let writable = changed(permissions, |mode| mode | 0o700);
                    fs::set_permissions(new.temporary.path(), writable)?;
                }
                return Ok(new);
            }
        };
        Err(io::Error::other(why))
    }

    fn next_to(path: PathBuf, is_folder: bool) -> io::Result<Self> {
        (process::hooks().before_temporary)().map_err(hinted)?;
        let permissions = fs::metadata(&path).ok().map(|data| data.permissions());
        let temporary = Temporary::next_to(&path).map_err(|error| {
            if is_descriptors(&error) {
                return hinted(error);
            }
            let folder = path.parent().unwrap_or(&path).display();
            io::Error::other(format!(
                "the folder {folder} takes no new file ({error}); give a name in another one, or free it"
            ))
        })?;
        Ok(Self {
            permissions,
            path,
            temporary,
            is_folder,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where it must be written: the file, or the files of the folder.
    pub(crate) fn place(&self) -> PathBuf {
        match self.is_folder {
            true => self.temporary.path().to_owned(),
            false => self.temporary.path().join("draft"),
        }
    }

    /// Makes the file, which is nobody's to read who could not read the one that it replaces.
    pub(crate) fn create(&self) -> io::Result<File> {
        let Some(permissions) = &self.permissions else {
            return File::create(self.place());
        };
        let mut options = File::options();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(self.place())?;
        // With other contents and perhaps another owner: those to read, write and run it.
        file.set_permissions(changed(permissions, |mode| mode & 0o777))?;
        Ok(file)
    }

    /// Gives it its name, once the writers of its files have synced them.
    pub(crate) fn publish(self) -> io::Result<()> {
        let place = self.place();
        if self.is_folder {
            sync_folder(&place)?;
            if let Some(permissions) = &self.permissions {
                fs::set_permissions(&place, permissions.clone())?;
            }
        }
        self.temporary.publish(&place, &self.path)?;
        // Makes its name durable.
        self.path.parent().map_or(Ok(()), sync_folder)
    }
}

/// The path of an output, a `kind` of thing, after links are followed.
fn named(path: &Path, kind: &str) -> io::Result<PathBuf> {
    if path.as_os_str() == "-" {
        return Err(io::Error::other(format!(
            "standard output is no place for it; give the name of a {kind}, ./- if it is to be called so",
        )));
    }
    resolve(path)
}

/// `permissions` with the mode that `change` makes of theirs, where there are modes.
fn changed(permissions: &Permissions, change: fn(u32) -> u32) -> Permissions {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        Permissions::from_mode(change(permissions.mode()))
    }
    #[cfg(not(unix))]
    {
        let _ = change;
        permissions.clone()
    }
}

/// Whether the folder `path` is where a file system begins.
#[cfg(unix)]
fn is_mount(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| fs::metadata(path).map(|data| data.dev()).ok();
    path.parent()
        .is_some_and(|parent| device(parent) != device(path))
}

#[cfg(not(unix))]
fn is_mount(_path: &Path) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two runs at a time found no folder there.
    #[test]
    fn a_folder_that_another_run_wrote_stays() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("out");
        let [first, second] = [Unpublished::folder(&path)?, Unpublished::folder(&path)?];
        for (folder, text) in [(&first, "first"), (&second, "second")] {
            fs::write(folder.place().join("file"), text)?;
        }
        first.publish()?;
        let error = second.publish().unwrap_err().to_string();
        assert!(
            error.starts_with("another run wrote this folder"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(path.join("file"))?, "first");
        assert_eq!(fs::read_dir(dir.path())?.count(), 1);
        Ok(())
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error_with_the_remedy() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let missing = dir.path().join("nodir");
        fs::write(dir.path().join("file"), "")?;
        for (path, expected) in [
            (
                missing.join("x"),
                format!("there is no folder {}; make it, or", missing.display()),
            ),
            (
                dir.path().join("file/x"),
                "is no folder; give a name in another one".to_owned(),
            ),
        ] {
            let file = Unpublished::file(&path).unwrap_err().to_string();
            let folder = Unpublished::folder(&path).unwrap_err().to_string();
            for error in [file, folder] {
                assert!(error.contains(&expected), "{error}");
                assert!(!error.contains("os error"), "{error}");
            }
        }
        let error = Unpublished::folder(&dir.path().join("file")).unwrap_err();
        assert!(error.to_string().contains("is no folder; give"), "{error}");
        Ok(())
    }

    #[test]
    fn only_regular_files_are_replaced() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let error = Unpublished::file(dir.path()).unwrap_err();
        assert!(error.to_string().contains("no regular file"), "{error}");
        assert!(Unpublished::file(&dir.path().join("..")).is_err());
        let error = Unpublished::file(&dir.path().join("new/")).unwrap_err();
        assert!(error.to_string().contains("name of a file"), "{error}");
        Ok(())
    }

    #[test]
    fn a_folder_takes_the_place_of_an_empty_one_only() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("ranks");
        for _ in 0..2 {
            let new = Unpublished::folder(&path)?;
            fs::write(new.place().join("file"), "whole")?;
            new.publish()?;
            assert!(Unpublished::folder(&path).is_err());
            fs::remove_file(path.join("file"))?;
        }
        assert_eq!(fs::read_dir(dir.path())?.count(), 1);
        Ok(())
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn where_a_file_system_begins() -> io::Result<()> {
        let dir = tempfile::tempdir()?;
        fs::create_dir(dir.path().join("folder"))?;
        assert!(!is_mount(&dir.path().join("folder")));
        assert!(is_mount(Path::new("/proc")));
        Ok(())
    }
}
