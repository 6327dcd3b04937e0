//! The real daemon on temporary roots. Each module is one promise; each test a sentence of it.

mod author;
mod bad_claims;
mod bad_files;
mod cdi_driver;
mod cdi_files;
mod commands;
mod compile;
mod conditions;
mod containers;
mod device_metadata;
mod device_numbers;
mod directories;
mod discovery;
mod disk_full;
mod disk_read_only;
mod disk_slow;
mod driver_files;
mod driver_images;
mod exclusive;
mod hardware;
mod hostile;
mod kubernetes;
mod local_api;
mod log;
mod lost_checkpoint;
mod main_job;
mod metrics;
mod names;
mod one_holder;
mod packages;
mod parameters;
mod pod_resources;
mod pods;
mod previous_versions;
mod quarantine;
mod reboot;
mod recordings;
mod resources;
mod simulate;
mod start;
mod stop;
mod supervised;
mod swaps;
mod trust;

use nodedock_tests::{Daemon, Options};

/// A daemon with simulated GPUs.
async fn with_gpus() -> Daemon {
    Daemon::with_gpus(Options::default()).await
}
