//! Files of drivers: the watched directories, images, trust in a file, and files that are stored for claims.

pub mod driver_image;
pub mod file_watch;
pub(crate) mod stored_files;
pub mod trust;
