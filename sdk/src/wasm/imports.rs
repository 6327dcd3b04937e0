//! The host's functions, called directly so that the linker drops those that a driver does not use.

use super::bindings::nodedock::driver::{device_nodes, ledger, log, sysfs, sysfs_write};
use super::convert::{Convert, all};
use crate::{Level, LiveClaim, NodeInfo, Problem};

/// Handle to the host, without any state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Imports;

impl Imports {
    pub(crate) fn log(&self, level: Level, message: &str, fields: &[(&str, &str)]) {
        let fields: Vec<_> =
            fields.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        log::write(level.convert(), message, &fields);
    }

    pub(crate) fn sysfs_read(&self, path: &str) -> Result<String, Problem> {
        sysfs::read(path).map_err(Convert::convert)
    }

    pub(crate) fn sysfs_read_bytes(&self, path: &str) -> Result<Vec<u8>, Problem> {
        sysfs::read_bytes(path).map_err(Convert::convert)
    }

    pub(crate) fn sysfs_read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        sysfs::read_dir(path).map_err(Convert::convert)
    }

    pub(crate) fn sysfs_read_link(&self, path: &str) -> Result<String, Problem> {
        sysfs::read_link(path).map_err(Convert::convert)
    }

    pub(crate) fn sysfs_glob(&self, pattern: &str) -> Result<Vec<String>, Problem> {
        sysfs::glob(pattern).map_err(Convert::convert)
    }

    pub(crate) fn sysfs_write(&self, path: &str, value: &str) -> Result<(), Problem> {
        sysfs_write::write(path, value).map_err(Convert::convert)
    }

    pub(crate) fn device_nodes_glob(&self, pattern: &str) -> Result<Vec<NodeInfo>, Problem> {
        device_nodes::glob(pattern).map(all).map_err(Convert::convert)
    }

    pub(crate) fn device_nodes_stat(&self, path: &str) -> Result<NodeInfo, Problem> {
        device_nodes::stat(path).map(Convert::convert).map_err(Convert::convert)
    }

    pub(crate) fn ledger_claims(&self) -> Vec<LiveClaim> {
        all(ledger::claims())
    }

    pub(crate) fn ledger_get(&self, uid: &str) -> Option<LiveClaim> {
        ledger::get(uid).map(Convert::convert)
    }

    pub(crate) fn ledger_holders(&self, pool: &str, device: &str) -> Vec<LiveClaim> {
        all(ledger::holders(pool, device))
    }
}
