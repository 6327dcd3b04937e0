//! The functions of the host, as a driver calls them: the state of its call, the files and devices of the node behind each function, the log,
//! WASI, and the tap that records or replays them. Knows neither how a call is begun nor how a driver is loaded.

pub(crate) mod host_files;
mod hostcalls;
pub(crate) mod log;
mod net_interfaces;
pub(crate) mod nodes;
mod pci;
pub(crate) mod state;
mod sysfs_reads;
pub(crate) mod tap;
pub(crate) mod tapped;
pub(crate) mod wasi;
mod wasi_context;
pub(crate) mod writes;

use nodedock_model::{Problem, ProblemCode};

fn granted(is_granted: bool, list: &str, what: &str) -> Result<(), Problem> {
    if is_granted {
        Ok(())
    } else {
        Err(not_granted(list, what))
    }
}

fn not_granted(list: &str, what: &str) -> Problem {
    Problem::denied(
        ProblemCode::NotGranted,
        format!("{what} is not granted ({list})"),
    )
    .with("grant", list)
}
