//! The host's ceiling: how explicitly a grant has to name what it allows, and what no grant allows.
//!
//! Rules decide by what something is (the kind of a device node, the directory of a file), never by what it is called alone. The lists of
//! names are a second line behind the rules. Pure: facts about the node are given.

use std::sync::LazyLock;

use crate::NodeKind;

use super::pattern::{Naming, PatternSet};

/// Facts about a device node, from the kernel.
#[derive(Debug, Clone, Copy)]
pub struct NodeFacts<'a> {
    pub kind: NodeKind,
    pub major: u32,
    pub minor: u32,
    /// The kernel's name of the device: the name of its directory below `/sys/devices`.
    pub name: Option<&'a str>,
    /// The name of its subsystem in `/sys`; of a device that `/sys` does not show, the name under which a module registered the major
    /// number (`/proc/devices`).
    pub subsystem: Option<&'a str>,
    /// True if it is the machine's console now (`/sys/class/tty/console/active`).
    pub is_console: bool,
}

/// Subsystems of character devices that are one device each, made for programs without rights of root.
const DEVICE_SUBSYSTEMS: &[&str] = &[
    "accel",
    "bluetooth",
    "cec",
    "counter",
    "cdx",
    "drm",
    "dvb",
    "gnss",
    "gpio",
    "habanalabs",
    "hailo_chardev",
    "apex",
    "hidraw",
    "iio",
    "infiniband",
    "infiniband_cm",
    "infiniband_mad",
    "infiniband_verbs",
    "input",
    "kfd",
    "lirc",
    "media",
    "nvidia",
    "nvidia-caps",
    "nvidia-caps-imex-channels",
    "nvidia-frontend",
    "nvidia-modeset",
    "nvidia-nvlink",
    "nvidia-nvswitch",
    "nvidia-uvm",
    "nvidiactl",
    "pps",
    "printer",
    "ptp",
    "rc",
    "rtc",
    "sound",
    "spidev",
    "tty",
    "usb",
    "usb_device",
    "usbmisc",
    "vfio",
    "vfio-dev",
    "video4linux",
    "wwan",
];

/// Subsystems of character devices that reach the memory of the machine, commands of its storage, its consoles and model-specific
/// registers, or that reset it.
const NEVER_SUBSYSTEMS: &[&str] = &[
    "bsg",
    "bsg-generic",
    "cxl",
    "dax",
    "mei_dmi",
    "msr",
    "mtd",
    "nd",
    "ndctl",
    "dimmctl",
    "nvme",
    "nvme-generic",
    "nvme-subsystem",
    "pts",
    "ptm",
    "raw",
    "scsi_generic",
    "scsi_changer",
    "sg",
    "ubi",
    "vc",
    "vcs",
    "vtconsole",
    "watchdog",
    "wmi",
    "scsi_tape",
    "megaraid_sas_ioctl",
];

/// The same of devices of `misc`, which has one of each kind, by their names in the kernel.
const NEVER_MISC: &[&str] = &[
    "device-mapper",
    "mcelog",
    "nvram",
    "snapshot",
    "watchdog",
    "kmsg",
    "sgx_provision",
    "xen!privcmd",
    "vboxguest",
    "crash",
    "vmcp",
    "zfs",
    "nvme-fabrics",
    "mpt2ctl",
    "mpt3ctl",
];

/// Numbers of `null`, `zero`, `full`, `random` and `urandom` (Linux, devices.txt); every other device with the major number of memory reaches
/// memory, ports or the kernel's log.
const MEMORY_MAJOR: u32 = 1;
const HARMLESS_MINORS: &[u32] = &[3, 5, 7, 8, 9];
/// Virtual consoles and the terminals of processes (devices.txt): `tty0` to `tty63`, and `tty`, `console`, `ptmx` and `ttyprintk`.
const VIRTUAL_CONSOLES_MAJOR: u32 = 4;
const VIRTUAL_CONSOLES: u32 = 64;
const TERMINALS_MAJOR: u32 = 5;
const TERMINALS: u32 = 4;
/// Pseudo terminals, those of BSD too: the directory of the others is no part of `/sys`.
const PSEUDO_TERMINALS: [std::ops::RangeInclusive<u32>; 2] = [2..=3, 128..=143];
/// Groups of `vfio` without an IOMMU reach the memory of the machine.
const WITHOUT_IOMMU: &str = "noiommu-";

/// Returns how a grant has to name a device node; `None`: no driver may have it.
pub fn device_node(facts: NodeFacts<'_>) -> Option<Naming> {
    let NodeFacts {
        kind,
        major,
        minor,
        name,
        subsystem,
        is_console,
    } = facts;
    if kind != NodeKind::Character {
        return Some(Naming::Path);
    }
    let is_terminal = (major == VIRTUAL_CONSOLES_MAJOR && minor < VIRTUAL_CONSOLES)
        || (major == TERMINALS_MAJOR && minor < TERMINALS)
        || PSEUDO_TERMINALS
            .iter()
            .any(|majors| majors.contains(&major));
    let is_memory = major == MEMORY_MAJOR && !HARMLESS_MINORS.contains(&minor);

    match subsystem {
        _ if is_terminal || is_memory || is_console => None,
        Some(subsystem) if NEVER_SUBSYSTEMS.contains(&subsystem) => None,
        Some("misc") if name.is_some_and(|name| NEVER_MISC.contains(&name)) => None,
        Some("vfio") if name.is_some_and(|name| name.starts_with(WITHOUT_IOMMU)) => None,
        Some(subsystem) if DEVICE_SUBSYSTEMS.contains(&subsystem) => Some(Naming::Glob),
        Some(_) | None => Some(Naming::Path),
    }
}

/// Directories of which a program without rights needs files: libraries, firmware, and facts of the kernel.
static SYSTEM_LIBRARIES: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "/usr/{lib,lib32,lib64,libx32,libexec,share}/**",
        "/usr/local/{lib,lib64,share}/**",
        "/{lib,lib32,lib64,libx32}/**",
        "/opt/**",
        // Where /opt is on machines with an immutable root (ostree), and where everything is on NixOS.
        "/var/opt/**",
        "/nix/store/**",
    ])
});

static KERNEL_FACTS: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "/proc/driver/**",
        "/proc/{cpuinfo,devices,filesystems,meminfo,modules}",
    ])
});

/// The configuration of the node's own services, and accounts. In lower case: the path is compared in lower case too.
static SERVICES: LazyLock<PatternSet> = LazyLock::new(|| {
    with_all_below(&[
        "/etc/{networkmanager,x11,alternatives,apparmor,apparmor.d,apt,audit,bind,ca-certificates,ceph,cloud,cni}",
        "/etc/{containerd,containers,credstore,credstore.encrypted,crio,default,dhcp,dnf,docker,fapolicyd}",
        "/etc/{grub.d,init.d,ipsec.d,iscsi,kubernetes,letsencrypt,libvirt,lvm,machine-info.d,multipath,mysql}",
        "/etc/{netplan,network,nodedock,nvme,openvpn,pam.d,pki,polkit-1,postfix,ppp,profile.d,rancher,samba}",
        "/etc/{security,selinux,skel,ssh,ssl,strongswan,sudoers.d,sysconfig,systemd,tpm2-tss,udev}",
        "/etc/{wireguard,wpa_supplicant,xdg,yum,yum.repos.d}",
        "/etc/{cron,krb5,rc,apt,pki,security,sssd,swanctl}*",
        "/etc/{*shadow,passwd,group,sudoers,fstab,crypttab,hosts,exports}*",
    ])
});

/// Files and directories that are named as keys and credentials, in lower case.
static SECRETS: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "**/*.{creds,key,pem,p12,pfx,jks,keytab,kdbx,ppk}",
        "**/{.env,.dockerconfigjson,auth.json,kubeconfig,.netrc,.pgpass,.htpasswd,.npmrc,.pypirc,.git-credentials,authorized_keys,known_hosts}",
        "**/id_{rsa,dsa,ecdsa,ed25519}*",
        "**/*{secret,password,passwd,credential,token,apikey,api-key,api_key,private-key,private_key,privkey}*",
        "**/*{secret,password,passwd,credential,token,apikey,api-key,api_key,private-key,private_key,privkey}*/**",
    ])
});

fn with_all_below(texts: &[&str]) -> PatternSet {
    let texts = texts
        .iter()
        .flat_map(|path| [(*path).to_owned(), format!("{path}/**")]);
    PatternSet::new(texts).expect("the patterns above are globs")
}

fn patterns(texts: &[&str]) -> PatternSet {
    PatternSet::new(texts.iter().copied()).expect("the patterns above are globs")
}

/// Returns how a grant has to name a file or directory that a driver reads; `None`: no driver may read it. `path` is absolute, plain and without
/// links. What a user without rights could not open is refused besides.
pub fn host_file(path: &str) -> Option<Naming> {
    let lower = path.to_lowercase();
    if SERVICES.matches(&lower) || SECRETS.matches(&lower) {
        return None;
    }
    if SYSTEM_LIBRARIES.matches(path) || KERNEL_FACTS.matches(path) {
        return Some(Naming::Glob);
    }
    below_vendor(path, "/etc/")
}

/// The directory of a vendor, which a glob names: `/etc/VENDOR/...`.
fn below_vendor(path: &str, parent: &str) -> Option<Naming> {
    let (_, rest) = path.strip_prefix(parent)?.split_once('/')?;
    (!rest.is_empty()).then(|| Naming::Directory(parent.matches('/').count()))
}

/// Never mounted, nor anything below: the kernel's own file systems, the node's own state and secrets, the homes of its users, and what gives control of the node.
const NEVER_MOUNTED: &[&str] = &[
    "/boot",
    "/dev",
    "/efi",
    "/home",
    "/proc",
    "/root",
    "/sys",
    "/tmp",
    "/run/{buildkit,containerd,containers,cri-dockerd,crio,dbus,docker,k3s,lock,log,lvm,mount,netns,nodedock,podman,secrets,sshd,sudo,systemd,udev,user}",
    "/run/{*.sock,*kube*,*.d,initramfs,credentials,runc,crun,k0s,vc,kata-containers,cni,libvirt,cilium,calico,spire}",
    "/media/root-rw",
    "/var/cache/nodedock",
    "/var/lib/{containerd,containers,cni,crio,cri-dockerd,docker,etcd,k0s,kubelet,kubeadm,nodedock,rancher,systemd,sudo,dbus,polkit-1,cloud,dkms,dpkg,rpm,libvirt,lxd,minikube,kube-proxy,etcd-*}",
    "/var/{log,spool,tmp,run}",
];

static MOUNTS_DENIED: LazyLock<PatternSet> = LazyLock::new(|| with_all_below(NEVER_MOUNTED));

/// Directories that are never mounted as a whole, since what is below them is decided by itself.
pub const SHARED_PARENTS: &[&str] = &[
    "/",
    "/etc",
    "/run",
    "/usr",
    "/var",
    "/var/cache",
    "/var/lib",
];

/// Directories that no other path may lead to: a bind mount of one of them at another path does not bypass a rule.
pub const WELL_KNOWN: &[&str] = &[
    "/",
    "/boot",
    "/dev",
    "/etc",
    "/home",
    "/proc",
    "/root",
    "/run",
    "/sys",
    "/tmp",
    "/usr",
    "/var",
    "/var/cache",
    "/var/lib",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/crio",
    "/var/lib/docker",
    "/var/lib/etcd",
    "/var/lib/kubelet",
    "/var/lib/nodedock",
    "/var/log",
    "/var/spool",
    "/var/tmp",
    "/run/containerd",
    "/run/docker",
    "/run/systemd",
    "/run/user",
    "/run/nodedock",
    "/var/cache/nodedock",
];

/// Patterns of paths that a container may write, if the grant allows it.
static WRITABLE: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "/{opt,run,srv,mnt,media,data,scratch}/**",
        "/var/{cache,lib,opt,scratch}/**",
    ])
});

/// Programs that the node runs as root are there as well.
static RUN_BY_THE_NODE: LazyLock<PatternSet> =
    LazyLock::new(|| with_all_below(&["/opt/{cni,containerd,bin,sbin}"]));

/// Returns how a grant has to name the source of a mount; `None`: it is never mounted. `path` is absolute, plain and without links.
pub fn mount_source(path: &str) -> Option<Naming> {
    if SHARED_PARENTS.contains(&path)
        || MOUNTS_DENIED.matches(path)
        || SERVICES.matches(&path.to_lowercase())
    {
        return None;
    }
    if SYSTEM_LIBRARIES.matches(path) {
        return Some(Naming::Glob);
    }
    let vendors = ["/etc/", "/run/", "/var/lib/"];
    Some(
        vendors
            .iter()
            .find_map(|parent| below_vendor(path, parent))
            .unwrap_or(Naming::Path),
    )
}

/// Returns how a grant has to name, with `:rw`, a source that a container may write to; `None`: no container may.
pub fn writable_source(path: &str) -> Option<Naming> {
    let is_writable = WRITABLE.matches(path) && !RUN_BY_THE_NODE.matches(path);
    // Below /opt each vendor has a directory.
    let vendor = path.starts_with("/opt/").then_some(Naming::Directory(2));
    mount_source(path)
        .filter(|_| is_writable)
        .map(|naming| vendor.map_or(naming, |vendor| naming.max(vendor)))
}

/// Names that change how programs find or run code, as a second line: only the exact name grants them.
pub(super) const LOADING_ENV: &[&str] = &[
    "*_INJECTION*",
    "*_TOOLS_LIB",
    "*_VISIBLE_DEVICES",
    "BASH_ENV",
    "CLASSPATH",
    "CORECLR_*",
    "COR_*",
    "DOTNET_*",
    "DYLD_*",
    "ENV",
    "GCONV_PATH",
    "GIO_*",
    "GIT_*",
    "GLIBC_TUNABLES",
    "GTK_*",
    "HOSTALIASES",
    "IFS",
    "JAVA_*",
    "JDK_*",
    "KUBERNETES_*",
    "LD_*",
    "LOCPATH",
    "LUA_*",
    "MALLOC_*",
    "NODE_*",
    "NPM_*",
    "OCL_ICD_*",
    "OPENSSL_*",
    "PATH",
    "PERL*",
    "PROMPT_COMMAND",
    "PYTHON*",
    "QT_*",
    "RUBY*",
    "SHELLOPTS",
    "SSL_*",
    "TCL*",
    "VK_*",
    "_JAVA_OPTIONS",
];

/// Annotations that container runtimes act on: only the exact key grants them.
pub(super) const RUNTIME_ANNOTATIONS: &[&str] = &[
    "*.cdi.k8s.io/**",
    "*.containerd.io/**",
    "*.crio.io/**",
    "*.docker.com/**",
    "*.k8s.io/**",
    "*.katacontainers.io/**",
    "*.kubernetes.io/**",
    "*.nri.io/**",
    "*.opencontainers.org/**",
    "*.podman.io/**",
    "*.cri-o.io/**",
    "cri-o.io/**",
    "kubernetes.io/**",
    "k8s.io/**",
    "nri.io/**",
];

#[cfg(test)]
mod tests;
