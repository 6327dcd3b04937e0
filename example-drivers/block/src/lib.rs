//! Offers disks and partitions that the config names, by names that stay the same, unless the node uses them.
//!
//! The sandbox shows use by the node only as far as `/sys` does. The host looks again, at mounts, swap and by an exclusive open, before a container gets a node.

#[cfg(test)]
mod tests;
mod volume;

use nodedock_sdk::{
    Claim, ContainerEdits, Context, DeviceHealth, DeviceNode, Driver, DriverInfo, Health, Host,
    Inventory, LeftOut, LeftOutDevice, PoolConfig, PoolDriver, Pools, Prepared, Problem, Trigger,
};

use volume::{TWIN, Volume};

struct Block;

nodedock_sdk::export_driver!(Block: Configuration, Health, LeftOut);

impl Driver for Block {
    fn describe() -> DriverInfo {
        DriverInfo::new("block.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("Disks and partitions that the config names and the node does not use")
            .sysfs_read(volume::files())
            .device_nodes(["/dev/{mmcblk,nvme,sd,vd,xvd}*"])
            .env(["BLOCK_*"])
            .events(["block"])
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let pools = Self::pools(&ctx.config)?;
        let offered = divided(host, &pools)?.0.into_iter();
        Ok(pools.inventory(offered.map(|volume| volume.device)))
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let (pools, volumes) = (Self::pools(&ctx.config)?, volume::all(host)?);
        let record = host.prepared_claims().get(&claim.id.uid);
        let is_repeated = record.is_some_and(|record| record.prepared);
        Prepared::each(claim, |allocated| {
            let volume = pools.allocated(allocated, &volumes, |one| one.device.clone())?;
            if let Some(reason) = volume.refusal.as_ref().filter(|_| !is_repeated) {
                let message = format!("{}: {reason}", volume.path);
                return Err(Problem::conflict("device-in-use", message));
            }
            let edits = ContainerEdits::new().env(allocated.variable("BLOCK"), &volume.path);
            Ok(edits.device_node(DeviceNode::new(&volume.path).numbers(volume.numbers)))
        })
    }
}

impl Health for Block {
    fn check(host: &Host, ctx: &Context) -> Result<Vec<DeviceHealth>, Problem> {
        let pools = Self::pools(&ctx.config)?;
        let offered = divided(host, &pools)?.0.into_iter();
        pools.health(offered.map(|volume| Ok((volume.device.clone(), volume.fault(host)?))))
    }
}

impl LeftOut for Block {
    fn list_devices(host: &Host, ctx: &Context) -> Result<Vec<LeftOutDevice>, Problem> {
        Ok(divided(host, &Self::pools(&ctx.config)?)?.1)
    }
}

impl PoolDriver for Block {
    const ATTRIBUTES: &'static [&'static str] = &["name", "partuuid", "serial", "wwid"];

    /// A pattern might match a disk that the operator does not mean.
    fn check_pool(pool: &PoolConfig) -> Result<(), String> {
        let reason = "select has to name each disk or partition, without wildcards";
        pool.is_exact().then_some(()).ok_or(reason.to_owned())
    }
}

/// Returns what the driver offers, and what a pool selects and is not offered because it is not free.
fn divided(host: &Host, pools: &Pools) -> Result<(Vec<Volume>, Vec<LeftOutDevice>), Problem> {
    let (mut offered, mut left_out) = (Vec::new(), Vec::new());
    for volume in volume::all(host)? {
        let pool = pools.pool_of(&volume.device).map(|pool| &pool.name);
        // What a container does with its device is no use by the node.
        let (claims, name) = (host.prepared_claims(), &volume.device.name);
        let is_claimed = |pool: &String| claims.using(pool, name).any(|record| record.prepared);
        match (&volume.refusal, pool) {
            (Some(reason), Some(pool)) if reason == TWIN || !is_claimed(pool) => {
                left_out.push(LeftOutDevice::new(&volume.path, reason));
            }
            (_, Some(_)) => offered.push(volume),
            (_, None) => {}
        }
    }
    Ok((offered, left_out))
}
