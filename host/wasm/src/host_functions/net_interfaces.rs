//! Facts about network interfaces, from `/sys/class/net`: it shows the network namespace of the node also to a daemon in a pod, whose own
//! namespace, and so netlink, would show another. Blocking functions, not for async threads.

use crate::bindings::nodedock::driver::net_interfaces::{NetInterface, OperationalState};
use nodedock_core::sysfs::SysfsRoot;
use nodedock_model::rule::is_interface_name;
use nodedock_model::{Problem, ProblemCode, ProblemKind};

const CLASS: &str = "class/net";
/// Administratively up (`IFF_UP`, netdevice(7)).
const IFF_UP: u32 = 1;

/// Checks the name of an interface.
pub(crate) fn check_name(name: &str) -> Result<(), Problem> {
    if is_interface_name(name) {
        return Ok(());
    }
    let shown: String = name.chars().take(64).collect();
    Err(Problem::invalid(
        ProblemCode::BadValue,
        format!("{shown:?} is not the name of a network interface"),
    ))
}

/// The interfaces of these names, sorted. One that is removed meanwhile is left out.
pub(crate) fn all(
    sysfs: &SysfsRoot,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<Vec<NetInterface>, Problem> {
    let names = match sysfs.read_dir(CLASS) {
        Ok(names) => names,
        Err(problem) if problem.kind == ProblemKind::NotFound => Vec::new(),
        Err(problem) => return Err(problem),
    };
    let mut interfaces = Vec::new();
    for name in names
        .iter()
        .filter(|name| is_interface_name(name) && is_wanted(name))
    {
        match get(sysfs, name) {
            Ok(interface) => interfaces.push(interface),
            Err(problem) if problem.kind == ProblemKind::NotFound => {}
            Err(problem) => return Err(problem),
        }
    }
    Ok(interfaces)
}

/// One interface. `bonding_masters` and other files of the class are none.
pub(crate) fn get(sysfs: &SysfsRoot, name: &str) -> Result<NetInterface, Problem> {
    let directory = format!("{CLASS}/{name}");
    let index = sysfs
        .find_text(&format!("{directory}/ifindex"))?
        .ok_or_else(|| {
            Problem::not_found(
                ProblemCode::NoSuchPath,
                format!("the node has no network interface {name}"),
            )
        })?;
    let find = |file: &str| {
        Ok::<_, Problem>(
            sysfs
                .find_text(&format!("{directory}/{file}"))?
                .unwrap_or_default(),
        )
    };
    let flags = find("flags")?;
    let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap_or(0);
    let device = format!("{directory}/device");
    Ok(NetInterface {
        name: name.to_owned(),
        index: index.parse().unwrap_or(0),
        hardware_address: find("address")?,
        mtu: find("mtu")?.parse().unwrap_or(0),
        admin_up: flags & IFF_UP == IFF_UP,
        state: state(&find("operstate")?),
        device_path: sysfs.find(&device)?,
    })
}

/// The kernel's texts (Documentation/ABI/testing/sysfs-class-net).
fn state(text: &str) -> OperationalState {
    match text {
        "notpresent" => OperationalState::NotPresent,
        "down" => OperationalState::Down,
        "lowerlayerdown" => OperationalState::LowerLayerDown,
        "testing" => OperationalState::Testing,
        "dormant" => OperationalState::Dormant,
        "up" => OperationalState::Up,
        _ => OperationalState::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_interfaces_have_facts() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("devices/pci0000:00/0000:00:03.0/net/eth0");
        fs::create_dir_all(&directory).unwrap();
        fs::create_dir_all(dir.path().join("class/net")).unwrap();
        for (file, value) in [
            ("ifindex", "3"),
            ("address", "02:00:00:00:00:01"),
            ("mtu", "9000"),
            ("flags", "0x1003"),
            ("operstate", "up"),
        ] {
            fs::write(directory.join(file), format!("{value}\n")).unwrap();
        }
        symlink("../../../0000:00:03.0", directory.join("device")).unwrap();
        let link = dir.path().join("class/net/eth0");
        symlink("../../devices/pci0000:00/0000:00:03.0/net/eth0", link).unwrap();
        fs::write(dir.path().join("class/net/bonding_masters"), "").unwrap();
        let sysfs = SysfsRoot::open(dir.path()).unwrap();

        let found = all(&sysfs, |_| true).unwrap();
        let [eth0] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!(
            (eth0.name.as_str(), eth0.index, eth0.mtu),
            ("eth0", 3, 9000)
        );
        assert_eq!((eth0.admin_up, eth0.state), (true, OperationalState::Up));
        assert_eq!(eth0.hardware_address, "02:00:00:00:00:01");
        assert_eq!(
            eth0.device_path.as_deref(),
            Some("devices/pci0000:00/0000:00:03.0")
        );

        assert_eq!(all(&sysfs, |name| name == "eth1").unwrap().len(), 0);
        assert_eq!(
            get(&sysfs, "bonding_masters").unwrap_err().code,
            "no-such-path"
        );
        assert_eq!(get(&sysfs, "eth9").unwrap_err().code, "no-such-path");
        for bad in ["", "..", "a/b", "eth0 ", "much-too-long-name"] {
            assert_eq!(check_name(bad).unwrap_err().code, "bad-value", "{bad:?}");
        }
    }
}
