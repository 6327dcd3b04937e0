//! Creates and removes the virtual functions of a physical function.

use nodedock_sdk::{Host, Problem};

use crate::config::PoolConfig;
use crate::journal::Made;
use crate::physical::PhysicalFunction;

const NUMVFS: &str = "sriov_numvfs";
const AUTOPROBE: &str = "sriov_drivers_autoprobe";

/// The creator of the virtual functions that a physical function has, according to the journals of claims.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Creator<'a> {
    /// An operator or another program.
    Other,
    /// This driver, and other claims use them.
    Shared(&'a Made),
    /// An earlier prepare of the same claim, which did not succeed. No other claim uses them.
    SamePrepare(&'a Made),
}

/// Returns which virtual functions a physical function must have for the one at `index`. `None`: those that an operator created are
/// used as they are.
///
/// # Errors
///
/// `conflict`, code `other-vf-count`, with both numbers: the kernel changes a count only by way of 0, which would remove virtual
/// functions that others use.
pub(crate) fn plan(
    physical: &PhysicalFunction,
    pool: &PoolConfig,
    index: u32,
    creator: Creator<'_>,
) -> Result<Option<Made>, Problem> {
    let wanted = pool.vfs.min(physical.total);
    let changes_autoprobe = physical
        .autoprobe
        .as_deref()
        .is_some_and(|value| value != pool.mode.autoprobe());
    let before = physical.autoprobe.clone().filter(|_| changes_autoprobe);
    match creator {
        Creator::Other if physical.count == 0 => Ok(Some(Made {
            count: wanted,
            autoprobe_before: before,
        })),
        Creator::Other if index < physical.count => Ok(None),
        Creator::Shared(made) if physical.count == 0 || physical.count == made.count => {
            if index < made.count {
                Ok(Some(made.clone()))
            } else {
                Err(other_count(physical, wanted))
            }
        }
        Creator::SamePrepare(made) => Ok(Some(Made {
            count: wanted,
            autoprobe_before: made.autoprobe_before.clone(),
        })),
        Creator::Other | Creator::Shared(_) => Err(other_count(physical, wanted)),
    }
}

/// Creates the planned virtual functions. If they exist it writes the same count, which changes nothing in the kernel: the host then
/// knows that the claim needs the value, and does not restore the previous one while the claim exists.
///
/// # Errors
///
/// The host's, and `unavailable`, code `too-few-vfs`, if the kernel creates another number; they are removed again.
pub(crate) fn create(
    host: &Host,
    physical: &PhysicalFunction,
    pool: &PoolConfig,
    made: &Made,
) -> Result<(), Problem> {
    let (sysfs, numvfs) = (host.sysfs(), physical.file(NUMVFS));
    if physical.count != 0 && physical.count != made.count {
        sysfs.write(&numvfs, "0")?;
    }
    if made.autoprobe_before.is_some() {
        sysfs.write(&physical.file(AUTOPROBE), pool.mode.autoprobe())?;
    }
    sysfs.write(&numvfs, &made.count.to_string())?;
    let count = sysfs.find_parsed::<u32>(&numvfs)?.unwrap_or(0);
    if count == made.count {
        return Ok(());
    }
    if count != 0 {
        sysfs.write(&numvfs, "0")?;
    }
    let (address, wanted) = (&physical.address, made.count);
    let message = format!("the kernel created {count} of {wanted} virtual functions of {address}");
    Err(Problem::unavailable("too-few-vfs", message))
}

/// Removes the virtual functions that this driver created; fewer of them, if no prepare of the claim has succeeded. Leaves any other count,
/// which is of another program.
pub(crate) fn remove(
    host: &Host,
    physical: &PhysicalFunction,
    made: &Made,
    is_prepared: bool,
) -> Result<(), Problem> {
    let may_be_ours = if is_prepared {
        made.count..=made.count
    } else {
        1..=made.count
    };
    if physical.count != 0 && !may_be_ours.contains(&physical.count) {
        let (address, count) = (physical.address.as_str(), physical.count.to_string());
        let fields = [
            ("function", address),
            ("count", &count),
            ("created", &made.count.to_string()),
        ];
        host.log().warn(
            "another program changed the number of virtual functions, which stay",
            &fields,
        );
        return Ok(());
    }
    if physical.count != 0 {
        host.sysfs().write(&physical.file(NUMVFS), "0")?;
    }
    match &made.autoprobe_before {
        Some(before) if physical.autoprobe.as_ref() != Some(before) => {
            host.sysfs().write(&physical.file(AUTOPROBE), before)
        }
        _ => Ok(()),
    }
}

fn other_count(physical: &PhysicalFunction, wanted: u32) -> Problem {
    let (address, count) = (&physical.address, physical.count);
    let message = format!(
        "{address} has {count} virtual functions and the config asks for {wanted}: the number cannot change while it is not 0"
    );
    Problem::conflict("other-vf-count", message)
}
