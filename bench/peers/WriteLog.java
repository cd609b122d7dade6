import com.datastax.driver.core.BoundStatement;
import com.datastax.driver.core.Cluster;
import com.datastax.driver.core.PreparedStatement;
import com.datastax.driver.core.ResultSetFuture;
import com.datastax.driver.core.Session;
import java.net.InetSocketAddress;
import java.util.Date;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.SplittableRandom;
import java.util.UUID;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicReference;

/**
 * Writes what bench/commitlog.py reads, as a client of a node: {@code java … WriteLog.java ADDRESS PORT WHAT COUNT}.
 * WHAT is "uniform" (inserts of one shape) or "mix". Its tables are those of bench/peers/log.py.
 */
class WriteLog {
    static final int IN_FLIGHT = 1024;
    static final int PARTITION_ROWS = 5;

    final Session session;
    final SplittableRandom random = new SplittableRandom(5);
    final PreparedStatement insert, insertTtl, update, updateTtl, addTag, addPrice, addNote, basket;
    final PreparedStatement deleteRow, deleteCell, deleteRange, deletePartition;

    WriteLog(Session session) {
        this.session = session;
        String columns = "(customer, seq, n, amount, name, ts, score, ref) VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
        insert = session.prepare("INSERT INTO orders " + columns);
        insertTtl = session.prepare("INSERT INTO orders " + columns + " USING TTL 864000");
        update = session.prepare("UPDATE orders SET n = ?, amount = ? WHERE customer = ? AND seq = ?");
        updateTtl = session.prepare("UPDATE orders USING TTL 3600 SET n = ?, amount = ? WHERE customer = ? AND seq = ?");
        addTag = session.prepare("UPDATE baskets SET tags = tags + ? WHERE customer = ?");
        addPrice = session.prepare("UPDATE baskets SET prices[?] = ? WHERE customer = ?");
        addNote = session.prepare("UPDATE baskets SET notes = notes + ? WHERE customer = ?");
        basket = session.prepare("INSERT INTO baskets (customer, tags, prices, notes) VALUES (?, ?, ?, ?)");
        deleteRow = session.prepare("DELETE FROM orders WHERE customer = ? AND seq = ?");
        deleteCell = session.prepare("DELETE name, score FROM orders WHERE customer = ? AND seq = ?");
        deleteRange = session.prepare("DELETE FROM orders WHERE customer = ? AND seq >= ? AND seq < ?");
        deletePartition = session.prepare("DELETE FROM orders WHERE customer = ?");
    }

    BoundStatement order(PreparedStatement statement, long row) {
        return statement.bind(
                "customer-" + row / PARTITION_ROWS,
                (int) (row % PARTITION_ROWS),
                (int) (row * 7 % Integer.MAX_VALUE),
                row * 1_000_003,
                "name number " + row % 1000,
                new Date(1_700_000_000_000L + row),
                row / 3.0,
                new UUID(row * 0x9E3779B97F4A7C15L, row * 0xC2B2AE3D27D4EB4FL));
    }

    /** Of 100: 80 inserts (4 with TTL), 10 updates (2 with TTL), 5 collections, 5 deletions. */
    BoundStatement mixed(long row) {
        int kind = random.nextInt(100);
        if (kind < 80) return order(kind < 4 ? insertTtl : insert, row);
        long older = random.nextLong(row + 1);
        String customer = "customer-" + older / PARTITION_ROWS;
        int seq = (int) (older % PARTITION_ROWS);
        if (kind < 90) return (kind < 82 ? updateTtl : update).bind((int) row, row * 3, customer, seq);
        return switch (kind) {
            case 90 -> addTag.bind(Set.of("tag-" + row % 50, "colour-" + row % 77), customer);
            case 91 -> addPrice.bind("article-" + row % 1000, (int) row, customer);
            case 92 -> addNote.bind(List.of("note number " + row), customer);
            case 93, 94 -> basket.bind(
                    customer,
                    Set.of("new", "tag-" + row % 50, "gift"),
                    Map.of("article-" + row % 1000, 100, "shipping", (int) (row % 500)),
                    List.of("first note", "note number " + row));
            case 95, 96 -> deleteRow.bind(customer, seq);
            case 97 -> deleteCell.bind(customer, seq);
            case 98 -> deleteRange.bind(customer, seq, seq + 2);
            default -> deletePartition.bind(customer);
        };
    }

    void write(String what, long count) throws Exception {
        Semaphore free = new Semaphore(IN_FLIGHT);
        AtomicReference<Throwable> failure = new AtomicReference<>();
        for (long row = 0; row < count && failure.get() == null; row++) {
            free.acquire();
            ResultSetFuture future = session.executeAsync(what.equals("mix") ? mixed(row) : order(insert, row));
            future.addListener(() -> {
                try {
                    future.getUninterruptibly();
                } catch (Throwable error) {
                    failure.set(error);
                }
                free.release();
            }, Runnable::run);
        }
        free.acquire(IN_FLIGHT);
        if (failure.get() != null) throw new IllegalStateException(failure.get());
    }

    public static void main(String[] arguments) throws Exception {
        InetSocketAddress node = new InetSocketAddress(arguments[0], Integer.parseInt(arguments[1]));
        try (Cluster cluster = Cluster.builder().addContactPointsWithPorts(node).withoutJMXReporting().build()) {
            new WriteLog(cluster.connect("bench")).write(arguments[2], Long.parseLong(arguments[3]));
        }
        System.exit(0);
    }
}
