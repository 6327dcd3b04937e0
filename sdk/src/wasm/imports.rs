//! The host's functions, called directly so that the linker drops those that a driver does not use.

use super::bindings::nodedock::driver::{
    common, device_nodes, host_files, log, net_interfaces, pci_driver, prepared_claims, progress,
    sysfs, sysfs_write,
};
use super::convert::{Convert, all};
use crate::facts::Page;
use crate::{ClaimRecord, FileInfo, Level, NetInterface, NodeInfo, Problem};

/// Handle to the host, without any state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Imports;

impl Imports {
    pub(crate) fn log(&self, level: Level, message: &str, fields: &[(&str, &str)]) {
        let fields: Vec<_> = fields
            .iter()
            .map(|(key, value)| common::KeyValue {
                key: (*key).to_owned(),
                value: (*value).to_owned(),
            })
            .collect();
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

    pub(crate) fn sysfs_wait_for(
        &self,
        pattern: &str,
        milliseconds: u32,
    ) -> Result<Vec<String>, Problem> {
        sysfs::wait_for(pattern, milliseconds).map_err(Convert::convert)
    }

    pub(crate) fn device_nodes_wait_for(
        &self,
        pattern: &str,
        milliseconds: u32,
    ) -> Result<Vec<NodeInfo>, Problem> {
        device_nodes::wait_for(pattern, milliseconds)
            .map(all)
            .map_err(Convert::convert)
    }

    pub(crate) fn sysfs_write(&self, path: &str, value: &str) -> Result<(), Problem> {
        sysfs_write::write(path, value).map_err(Convert::convert)
    }

    pub(crate) fn device_nodes_glob(&self, pattern: &str) -> Result<Vec<NodeInfo>, Problem> {
        device_nodes::glob(pattern)
            .map(all)
            .map_err(Convert::convert)
    }

    pub(crate) fn device_nodes_stat(&self, path: &str) -> Result<NodeInfo, Problem> {
        device_nodes::stat(path)
            .map(Convert::convert)
            .map_err(Convert::convert)
    }

    pub(crate) fn host_files_read(&self, path: &str) -> Result<String, Problem> {
        host_files::read(path).map_err(Convert::convert)
    }

    pub(crate) fn host_files_stat(&self, path: &str) -> Result<FileInfo, Problem> {
        host_files::stat(path)
            .map(Convert::convert)
            .map_err(Convert::convert)
    }

    pub(crate) fn host_files_glob(&self, pattern: &str) -> Result<Vec<FileInfo>, Problem> {
        host_files::glob(pattern).map(all).map_err(Convert::convert)
    }

    pub(crate) fn pci_driver_bind(
        &self,
        address: &str,
        driver: &str,
    ) -> Result<Vec<String>, Problem> {
        pci_driver::bind(address, driver).map_err(Convert::convert)
    }

    pub(crate) fn pci_driver_restore(&self, address: &str) -> Result<Vec<String>, Problem> {
        pci_driver::restore(address).map_err(Convert::convert)
    }

    pub(crate) fn net_interfaces_all(&self) -> Result<Vec<NetInterface>, Problem> {
        net_interfaces::all().map(all).map_err(Convert::convert)
    }

    pub(crate) fn net_interfaces_get(&self, name: &str) -> Result<NetInterface, Problem> {
        net_interfaces::get(name)
            .map(Convert::convert)
            .map_err(Convert::convert)
    }

    pub(crate) fn prepared_claims_all(&self, after: Option<&str>) -> Page {
        prepared_claims::all(after).convert()
    }

    pub(crate) fn prepared_claims_get(&self, uid: &str) -> Option<ClaimRecord> {
        prepared_claims::get(uid).map(Convert::convert)
    }

    pub(crate) fn prepared_claims_using_device(
        &self,
        pool: &str,
        device: &str,
        after: Option<&str>,
    ) -> Page {
        prepared_claims::using_device(pool, device, after).convert()
    }

    pub(crate) fn progress_save(&self, uid: &str, progress: &[u8]) -> Result<(), Problem> {
        progress::save(uid, progress).map_err(Convert::convert)
    }
}
