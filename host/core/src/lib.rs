//! The core of the host: the driver traits, the checkpoint, CDI, the registry, the records of claims, and the manager of claims, extended resources and pods.
//!
//! Knows no kind of driver and no caller: `nodedock-wasm` and `nodedock-native` bring drivers, `nodedock-kube` and the daemon bring requests.

pub mod adapters;
pub mod cdi;
pub mod cdi_driver;
pub mod cdi_watch;
pub mod checkpoint;
pub mod device_metadata;
pub mod driver;
pub mod edit_sources;
pub mod hardware;
pub mod hardware_keys;
mod left_out;
pub mod manager;
pub mod manifest;
pub mod pools;
pub mod recording;
pub mod records;
pub mod registry;
pub mod resources;
pub mod shares;
pub mod standard_attributes;
pub mod sysfs;
