//! Kernel drivers of PCI functions: binds a whole IOMMU group or nothing, and back. Each function is written, recorded and audited as a
//! value below `/sys` is.

use std::sync::Arc;

use crate::bindings::nodedock::driver::pci_driver;
use crate::host_functions::state::{CallState, Scope};
use crate::host_functions::writes::Target;
use nodedock_core::sysfs::SysfsRoot;
use nodedock_core::sysfs::attribute::Attribute;
use nodedock_core::sysfs::in_use::NodeUse;
use nodedock_core::sysfs::pci::{
    Binding, PciAddress, check_driver_name, function_in_use, no_such_driver,
};
use nodedock_model::Problem;

/// A function that is bound already, or what has to be done.
struct Step {
    address: PciAddress,
    binding: Attribute,
}

impl pci_driver::Host for CallState {
    async fn bind(&mut self, address: String, driver: String) -> Result<Vec<String>, Problem> {
        self.count_operation()?;
        let writer = self.writer(&address)?;
        let address: PciAddress = address.parse()?;
        check_driver_name(&driver)?;
        let steps = plan(Arc::clone(&self.scope), address, driver.clone()).await?;
        let functions = steps.iter().map(|step| step.address.to_string()).collect();
        let target = Binding::forced_to(&driver).to_string();
        let mut bound: Vec<Attribute> = Vec::new();
        for step in steps {
            if is_bound(&step.binding, &driver) {
                continue;
            }
            self.count_write()?;
            let wanted = Target::Bind(step.address, driver.clone());
            match self
                .write_value(wanted, target.clone(), Ok(writer.clone()))
                .await
            {
                Ok(before) => bound.extend(before),
                Err(problem) => {
                    self.undo(bound).await;
                    return Err(problem);
                }
            }
        }
        Ok(functions)
    }

    async fn restore(&mut self, address: String) -> Result<Vec<String>, Problem> {
        self.count_operation()?;
        let writer = self.writer(&address)?;
        let address: PciAddress = address.parse()?;
        let node = Arc::clone(&self.scope.node);
        let found = self
            .scope
            .look(move || bindings(&node.sysfs, node.sysfs.pci().group_of(&address)?))
            .await?;
        let claims = self.writes_for.clone().unwrap_or_default();
        let mut restored = Vec::new();
        for Step { address, binding } in found {
            let before = self
                .scope
                .node
                .journal
                .before(&writer, &claims, &binding.path);
            // Another device at the same address has its own kernel driver.
            let Some((_, before)) = before.filter(|(inode, _)| *inode == binding.inode) else {
                continue;
            };
            if binding.value.as_deref() != Some(before.as_str()) {
                self.count_write()?;
                self.write_value(Target::Unbind(address.clone()), before, Ok(writer.clone()))
                    .await?;
            }
            restored.push(address.to_string());
        }
        Ok(restored)
    }
}

impl CallState {
    /// Binds functions back to what they were, the last first. A failure is in the audit log, and the record of the claim restores it.
    async fn undo(&mut self, bound: Vec<Attribute>) {
        for before in bound.into_iter().rev() {
            let (Some(value), Some(driver)) = (before.value.clone(), self.scope.driver.clone())
            else {
                continue;
            };
            let address = before
                .path
                .trim_end_matches("/driver")
                .rsplit('/')
                .next()
                .unwrap_or_default();
            if let Ok(address) = address.parse() {
                let _ = self
                    .write_value(Target::Unbind(address), value, Ok(driver))
                    .await;
            }
        }
    }
}

/// The functions to bind, each checked against the grant and against what the node uses, before any of them changes.
async fn plan(
    scope: Arc<Scope>,
    address: PciAddress,
    driver: String,
) -> Result<Vec<Step>, Problem> {
    let (node, checked) = (Arc::clone(&scope.node), Arc::clone(&scope));
    let work = move || {
        let functions = node.sysfs.pci().bound_together(&address, &driver)?;
        for function in &functions {
            Target::Bind(function.clone(), driver.clone()).check_grant(&checked.effective, "")?;
        }
        if !node.sysfs.pci().has_driver(&driver)? {
            return Err(no_such_driver(&driver));
        }
        let steps = bindings(&node.sysfs, functions)?;
        let (proc, dev) = (node.hardware.proc(), node.hardware.dev());
        let usage = NodeUse {
            sysfs: &node.sysfs,
            proc: &proc,
            dev: &dev,
        };
        for step in steps
            .iter()
            .filter(|step| !is_bound(&step.binding, &driver))
        {
            if let Some(reason) = usage.function(&step.address)? {
                return Err(function_in_use(&step.address, &reason));
            }
        }
        Ok(steps)
    };
    scope.look(work).await
}

fn bindings(sysfs: &SysfsRoot, functions: Vec<PciAddress>) -> Result<Vec<Step>, Problem> {
    let step = |address: PciAddress| {
        Ok(Step {
            binding: sysfs.pci().binding(&address)?,
            address,
        })
    };
    functions.into_iter().map(step).collect()
}

fn is_bound(binding: &Attribute, driver: &str) -> bool {
    binding
        .value
        .as_deref()
        .is_some_and(|value| Binding::from(value).driver.as_deref() == Some(driver))
}
