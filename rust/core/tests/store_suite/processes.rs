//! Real files, real processes, real SIGKILL: a child plays one party and kills itself at a named point.

use crate::world::{Given, Items, Log, check, identity, place, session};
use cloister_core::net::{Channel, Limits, tcp};
use cloister_core::ot::ReceivedPads;
use cloister_core::ot::store::{Disk, DiskFile, Lane, Place, RealDisk, Store};
use cloister_core::{Error, Result, Role};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// The real disk, with a process that ends at the n-th passage of a point.
struct Deadly {
    point: String,
    left: AtomicU64,
}

impl Disk for Deadly {
    fn make_directory(&self, path: &Path) -> io::Result<()> {
        RealDisk.make_directory(path)
    }
    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        RealDisk.list(directory)
    }
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        RealDisk.create(path)
    }
    fn open(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        RealDisk.open(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove(path)
    }
    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_directory(path)
    }
    fn mode(&self, path: &Path) -> io::Result<u32> {
        RealDisk.mode(path)
    }
    fn reached(&self, point: &'static str) {
        if point == self.point && self.left.fetch_sub(1, SeqCst) == 1 {
            let kill = format!("kill -9 {}", std::process::id());
            let _ = Command::new("sh").args(["-c", &kill]).status();
            // The signal may take a moment; nothing after this point may run.
            std::thread::sleep(Duration::from_secs(60));
        }
    }
}

fn real_place(root: &Path, role: Role) -> Place {
    let home = root.join(if role.is_client() { "client" } else { "server" });
    Place { directory: home.join(place().directory.file_name().unwrap()), beside: home.join("beside") }
}

fn play(root: &Path, role: Role, stream: TcpStream, number: u64, disk: Arc<dyn Disk>, log: &Log) -> Result<()> {
    let place = real_place(root, role);
    let start = Instant::now();
    let store = if Store::exists(&*disk, &place) {
        Store::open(disk, &place, &identity(role))?
    } else {
        Store::create(disk, &place, &identity(role))?
    };
    assert!(start.elapsed() < Duration::from_secs(10), "a busy machine may be slow, but not this slow");
    let pipe = tcp::insecure_plain_loopback(stream, &Limits::default())?;
    session(store, role, Channel::new(Box::new(pipe)), number, log)
}

/// Not a test by itself: the child of the tests below.
#[test]
#[ignore = "run as a child process by the other tests of this file"]
fn child_party() {
    let Ok(arguments) = std::env::var("CLOISTER_STORE_CHILD") else { return };
    let parts: Vec<&str> = arguments.split('|').collect();
    let role = if parts[1] == "client" { Role::Client } else { Role::Server };
    let disk = Arc::new(Deadly { point: parts[4].into(), left: AtomicU64::new(parts[5].parse().unwrap()) });
    let stream = TcpStream::connect(parts[2]).unwrap();
    let log = Log::default();
    play(Path::new(parts[0]), role, stream, parts[3].parse().unwrap(), disk, &log).unwrap();
}

/// One session between this process and a child; true if the child was killed.
fn with_child(root: &Path, child: Role, number: u64, point: &str, nth: u64, log: &Log) -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let who = if child.is_client() { "client" } else { "server" };
    let address = listener.local_addr().unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["processes::child_party", "--exact", "--ignored", "--quiet"])
        .env("CLOISTER_STORE_CHILD", format!("{}|{who}|{address}|{number}|{point}|{nth}", root.display()))
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let stream = tcp::accept(&listener, Duration::from_secs(30)).unwrap();
    let mine = play(root, child.other(), stream, number, Arc::new(RealDisk), log);
    let status = process.wait().unwrap();
    use std::os::unix::process::ExitStatusExt;
    let killed = status.signal() == Some(9);
    match mine {
        Ok(()) => assert!(killed || status.success(), "{point}"),
        // A child that dies while it opens its store is seen as a link that closed.
        Err(Error::PeerGone { .. } | Error::Link(_)) => assert!(killed, "{point}: {status:?}"),
        Err(other) => panic!("{point}: {other:?}"),
    }
    killed
}

/// Points of a session with a store that has something in it, one of each step and place in it.
const POINTS: [&str; 26] = [
    "open.begin",
    "open.loaded",
    "open.mark-written",
    "open.epoch-written",
    "agree.begin",
    "agree.mark-written",
    "agree.mark-fsynced",
    "agree.epoch-fsynced",
    "fill.head-written",
    "fill.block-written",
    "fill.before-rename",
    "fill.renamed",
    "fill.directory-fsynced",
    "fill.confirmed",
    "fill.mark-fsynced",
    "reserve.begin",
    "reserve.mark-written",
    "reserve.epoch-written",
    "reserve.epoch-fsynced",
    "exchange.sent",
    "exchange.received",
    "use.block-read",
    "use.block-given",
    "wipe.written",
    "wipe.before-fsync",
    "compact.removed",
];

fn kill_at(points: &[&str]) {
    let root = std::env::temp_dir().join(format!("cloister-kill-{}-{}", std::process::id(), points.len()));
    for child in [Role::Client, Role::Server] {
        let root: PathBuf = root.join(if child.is_client() { "c" } else { "s" });
        for role in [Role::Client, Role::Server] {
            std::fs::create_dir_all(real_place(&root, role).directory.parent().unwrap()).unwrap();
        }
        let (log, mut number) = (Log::default(), 1);
        assert!(!with_child(&root, child, number, "none", 1, &log));
        for (i, point) in points.iter().enumerate() {
            number += 1;
            // A session opens and agrees once; everything else it does several times.
            let often = !point.starts_with("open") && !point.starts_with("agree");
            let nth = if often { 1 + i as u64 % 2 } else { 1 };
            assert!(with_child(&root, child, number, point, nth, &log), "{point} was not reached");
            number += 1;
            assert!(!with_child(&root, child, number, "none", 1, &log));
        }
        // What the surviving peer was given over all sessions. The child's own log dies with it; the tests with a disk in
        // memory look at both.
        let empty: [Given; 0] = [];
        let given = check(&log.lock().unwrap(), &empty).unwrap();
        println!("{} kills of the {child:?}, {given} items, none twice", points.len());
    }
    std::fs::remove_dir_all(root).unwrap();
}

#[test]
fn a_killed_process_never_makes_its_peer_use_an_item_twice() {
    kill_at(&["agree.mark-fsynced", "fill.renamed", "reserve.epoch-fsynced", "exchange.received"]);
}

#[test]
#[ignore = "all points with processes; minutes on a busy machine"]
fn processes_killed_at_every_kind_of_point() {
    kill_at(&POINTS);
}

#[test]
fn the_log_of_a_receiver_is_checked_too() {
    let given = |session| Given {
        session,
        lane: Lane::PadsFromServer,
        items: Items::Received(ReceivedPads { choices: vec![1], pads: vec![7] }),
    };
    assert!(check(&[given(1), given(2)], &[]).is_err());
}
