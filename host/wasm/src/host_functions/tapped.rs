//! The functions of the host behind the tap of a call.

use wasmtime::component::HasData;

use super::state::CallState;
use super::tap::{LOG, Next, Tap};
use crate::bindings::nodedock::driver::{
    claims, common, container_edits, device_nodes, host_files, inventory, log, net_interfaces,
    pci_driver, prepared_claims, progress, sysfs, sysfs_write,
};
use crate::bindings::types;
use nodedock_core::recording::{CallOutcome, Failure, Raw, raw};
use nodedock_model::{Problem, ProblemCode};

const FAILED: &str = "host-function-failed";

/// The host as a driver has it: its functions, behind the tap of the call.
pub(crate) struct Tapped<'a>(pub(crate) &'a mut CallState);

/// Names [`Tapped`] to the linker.
pub(crate) struct HasTapped;

impl HasData for HasTapped {
    type Data<'a> = Tapped<'a>;
}

/// A function that returns a problem. A replay that stops makes it a trap, in `convert_problem`.
macro_rules! tapped {
    ($tapped:ident, $name:literal, [$($argument:ident),*], $run:expr) => {{
        let Some(tap) = $tapped.0.tap.clone() else { return $run.await };
        let arguments: Vec<Raw> = vec![$(raw(&$argument)),*];
        match tap.next($name, raw(&arguments)) {
            Next::Run(arguments) => {
                let result = $run.await;
                tap.answered($name, arguments, CallOutcome::Returned(raw(&result)));
                result
            }
            Next::Return(answer) => tap.parsed($name, &answer).unwrap_or_else(|| Err(stopped())),
            Next::Stop => Err(stopped()),
        }
    }};
}

/// A function without a problem, which can only trap.
macro_rules! tapped_plain {
    ($tapped:ident, $name:literal, [$($argument:ident),*], $run:expr) => {{
        let Some(tap) = $tapped.0.tap.clone() else { return $run.await };
        let arguments: Vec<Raw> = vec![$(raw(&$argument)),*];
        match tap.next($name, raw(&arguments)) {
            Next::Run(arguments) => {
                let result = $run.await;
                let answer = match &result {
                    Ok(value) => CallOutcome::Returned(raw(value)),
                    Err(error) => CallOutcome::Failed(failed(error)),
                };
                tap.answered($name, arguments, answer);
                result
            }
            Next::Return(answer) => tap.parsed($name, &answer).ok_or_else(trap),
            Next::Stop => Err(trap()),
        }
    }};
}

/// Returns a placeholder problem, which becomes a trap.
fn stopped() -> Problem {
    Problem::internal(ProblemCode::DriverTrapped, "the replay stops here")
}

fn trap() -> wasmtime::Error {
    wasmtime::format_err!("the replay stops here")
}

fn failed(error: &wasmtime::Error) -> Failure {
    Failure {
        code: FAILED.to_owned(),
        message: error.root_cause().to_string(),
        by_time: false,
    }
}

impl inventory::Host for Tapped<'_> {}

impl claims::Host for Tapped<'_> {}

impl container_edits::Host for Tapped<'_> {}

impl common::Host for Tapped<'_> {
    fn convert_problem(&mut self, problem: Problem) -> wasmtime::Result<types::Problem> {
        if self.0.tap.as_ref().is_some_and(Tap::is_stopped) {
            return Err(trap());
        }
        common::Host::convert_problem(self.0, problem)
    }
}

impl log::Host for Tapped<'_> {
    fn write(
        &mut self,
        level: log::Level,
        message: String,
        fields: Vec<types::KeyValue>,
    ) -> wasmtime::Result<()> {
        if let Some(tap) = &self.0.tap {
            tap.answered(
                LOG,
                raw(&(&level, &message, &fields)),
                CallOutcome::Returned(raw(&())),
            );
        }
        log::Host::write(self.0, level, message, fields)
    }
}

impl sysfs::Host for Tapped<'_> {
    async fn read(&mut self, path: String) -> Result<String, Problem> {
        tapped!(self, "sysfs.read", [path], sysfs::Host::read(self.0, path))
    }

    async fn read_bytes(&mut self, path: String) -> Result<Vec<u8>, Problem> {
        tapped!(
            self,
            "sysfs.read-bytes",
            [path],
            sysfs::Host::read_bytes(self.0, path)
        )
    }

    async fn read_dir(&mut self, path: String) -> Result<Vec<String>, Problem> {
        tapped!(
            self,
            "sysfs.read-dir",
            [path],
            sysfs::Host::read_dir(self.0, path)
        )
    }

    async fn read_link(&mut self, path: String) -> Result<String, Problem> {
        tapped!(
            self,
            "sysfs.read-link",
            [path],
            sysfs::Host::read_link(self.0, path)
        )
    }

    async fn glob(&mut self, glob: String) -> Result<Vec<String>, Problem> {
        tapped!(self, "sysfs.glob", [glob], sysfs::Host::glob(self.0, glob))
    }

    async fn wait_for(&mut self, glob: String, milliseconds: u32) -> Result<Vec<String>, Problem> {
        tapped!(
            self,
            "sysfs.wait-for",
            [glob, milliseconds],
            sysfs::Host::wait_for(self.0, glob, milliseconds)
        )
    }
}

impl sysfs_write::Host for Tapped<'_> {
    async fn write(&mut self, path: String, value: String) -> Result<(), Problem> {
        tapped!(
            self,
            "sysfs-write.write",
            [path, value],
            sysfs_write::Host::write(self.0, path, value)
        )
    }
}

impl host_files::Host for Tapped<'_> {
    async fn read(&mut self, path: String) -> Result<String, Problem> {
        tapped!(
            self,
            "host-files.read",
            [path],
            host_files::Host::read(self.0, path)
        )
    }

    async fn stat(&mut self, path: String) -> Result<host_files::FileInfo, Problem> {
        tapped!(
            self,
            "host-files.stat",
            [path],
            host_files::Host::stat(self.0, path)
        )
    }

    async fn glob(&mut self, glob: String) -> Result<Vec<host_files::FileInfo>, Problem> {
        tapped!(
            self,
            "host-files.glob",
            [glob],
            host_files::Host::glob(self.0, glob)
        )
    }
}

impl pci_driver::Host for Tapped<'_> {
    async fn bind(&mut self, address: String, driver: String) -> Result<Vec<String>, Problem> {
        tapped!(
            self,
            "pci-driver.bind",
            [address, driver],
            pci_driver::Host::bind(self.0, address, driver)
        )
    }

    async fn restore(&mut self, address: String) -> Result<Vec<String>, Problem> {
        tapped!(
            self,
            "pci-driver.restore",
            [address],
            pci_driver::Host::restore(self.0, address)
        )
    }
}

impl device_nodes::Host for Tapped<'_> {
    async fn glob(&mut self, glob: String) -> Result<Vec<device_nodes::NodeInfo>, Problem> {
        tapped!(
            self,
            "device-nodes.glob",
            [glob],
            device_nodes::Host::glob(self.0, glob)
        )
    }

    async fn wait_for(
        &mut self,
        glob: String,
        milliseconds: u32,
    ) -> Result<Vec<device_nodes::NodeInfo>, Problem> {
        tapped!(
            self,
            "device-nodes.wait-for",
            [glob, milliseconds],
            device_nodes::Host::wait_for(self.0, glob, milliseconds)
        )
    }

    async fn stat(&mut self, path: String) -> Result<device_nodes::NodeInfo, Problem> {
        tapped!(
            self,
            "device-nodes.stat",
            [path],
            device_nodes::Host::stat(self.0, path)
        )
    }
}

impl net_interfaces::Host for Tapped<'_> {
    async fn all(&mut self) -> Result<Vec<net_interfaces::NetInterface>, Problem> {
        tapped!(
            self,
            "net-interfaces.all",
            [],
            net_interfaces::Host::all(self.0)
        )
    }

    async fn get(&mut self, name: String) -> Result<net_interfaces::NetInterface, Problem> {
        tapped!(
            self,
            "net-interfaces.get",
            [name],
            net_interfaces::Host::get(self.0, name)
        )
    }
}

impl prepared_claims::Host for Tapped<'_> {
    async fn all(&mut self, after: Option<String>) -> wasmtime::Result<prepared_claims::Page> {
        tapped_plain!(
            self,
            "prepared-claims.all",
            [after],
            prepared_claims::Host::all(self.0, after)
        )
    }

    async fn using_device(
        &mut self,
        pool: String,
        device: String,
        after: Option<String>,
    ) -> wasmtime::Result<prepared_claims::Page> {
        tapped_plain!(
            self,
            "prepared-claims.using-device",
            [pool, device, after],
            prepared_claims::Host::using_device(self.0, pool, device, after)
        )
    }

    async fn get(&mut self, uid: String) -> wasmtime::Result<Option<types::ClaimRecord>> {
        tapped_plain!(
            self,
            "prepared-claims.get",
            [uid],
            prepared_claims::Host::get(self.0, uid)
        )
    }
}

impl progress::Host for Tapped<'_> {
    async fn save(&mut self, uid: String, progress: Vec<u8>) -> Result<(), Problem> {
        tapped!(
            self,
            "progress.save",
            [uid, progress],
            progress::Host::save(self.0, uid, progress)
        )
    }
}
