//! The real daemon, killed: at every seam that it has a name for, and at any moment under load. What it answered holds afterwards, and
//! drivers, checkpoint and CDI directory agree.
//!
//! The named seams are fail points (`nodedock_base::failpoint`), which only a program with the feature `failpoints` has: the one
//! that is built together with these tests.

mod driver;
mod load;
mod lost;
mod points;
mod random;
mod resources;
mod scene;
mod swap;
mod values;

/// Says at a failure where the test was.
struct Place(String);

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this happened {}", self.0);
        }
    }
}
