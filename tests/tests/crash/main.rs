//! The real daemon, killed: at every seam that it has a name for, and at any moment under load. What it answered holds afterwards, and
//! drivers, checkpoint and CDI directory agree.
//!
//! The named seams are fail points (`nodedock_base::failpoint`), which only a program with the feature `failpoints` has: the one
//! that is built together with these tests.

mod adapters;
mod bindings;
mod driver;
mod load;
mod local;
mod lost;
mod points;
mod random;
mod resources;
mod scene;
mod swap;
mod values;

use nodedock_base::failpoint::Point;

/// The point at which the daemon dies, and the behaviour of the pod whose call it does not answer.
#[derive(Debug, Clone, Copy)]
struct Death {
    point: Point,
    /// Number of the pass, from 1, in one life of the daemon.
    pass: u32,
    /// The pod retries; else one that was coming leaves, and one that was leaving is not heard of for a while.
    pods_return: bool,
}

/// Lets the daemon die at one pass of a point after the other, until it lives through `play`. Returns how often it died.
async fn every_pass(point: Point, mut play: impl AsyncFnMut(u32) -> bool) -> u32 {
    let mut pass = 1;
    while play(pass).await {
        pass += 1;
    }
    assert!(pass > 1, "{point:?} was never passed");
    pass - 1
}

/// Says at a failure where the test was.
struct Place(String);

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this happened {}", self.0);
        }
    }
}
