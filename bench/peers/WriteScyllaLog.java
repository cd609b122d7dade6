import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HexFormat;
import java.util.List;
import java.util.UUID;
import org.apache.cassandra.io.sstable.CQLSSTableWriter;

/**
 * Writes the CDC log of bench/scylla_log.py as SSTables:
 * {@code java … WriteScyllaLog.java FOLDER CREATE_TABLE INSERT ROWS STREAMS START_US SPAN_US TTL_S}. STREAMS is a file
 * with a stream id, in hex, per line. What row i holds is told in peers/scylla_log_table.py, which counts it by itself.
 */
class WriteScyllaLog {
    private static final long UUID_EPOCH = 0x01b21dd213814000L;
    private static final Object UNSET = CQLSSTableWriter.UNSET_VALUE;

    public static void main(String[] arguments) throws Exception {
        long rows = Long.parseLong(arguments[3]);
        List<String> streams = Files.readAllLines(Path.of(arguments[4]));
        long start = Long.parseLong(arguments[5]);
        long span = Long.parseLong(arguments[6]);
        int ttl = Integer.parseInt(arguments[7]);
        try (CQLSSTableWriter writer = CQLSSTableWriter.builder()
                .inDirectory(arguments[0])
                .forTable(arguments[1])
                .using(arguments[2])
                .withBufferSizeInMiB(8)
                .build()) {
            for (int number = 0; number < streams.size(); number++) {
                byte[] stream = HexFormat.of().parseHex(streams.get(number));
                for (long row = number; row < rows; row += streams.size()) {
                    write(writer, stream, row, start + row * span / rows, ttl);
                }
            }
        }
        // Cassandra leaves threads behind.
        System.exit(0);
    }

    private static void write(CQLSSTableWriter writer, byte[] stream, long row, long micros, int ttl) throws Exception {
        int kind = (int) (row % 10);
        boolean inserted = kind < 6;
        boolean deleted = kind == 9;
        writer.addRow(
                ByteBuffer.wrap(stream),
                timeuuid(micros, row * 0x9E3779B97F4A7C15L),
                0,
                (byte) (inserted ? 2 : deleted ? 3 : 1),
                true,
                (int) (row * 31 % 100_003),
                (int) (row % 1000),
                deleted || kind == 8 ? UNSET : (int) (row % 777),
                inserted ? "text number " + row % 5000 : UNSET,
                kind == 7 ? true : UNSET,
                deleted ? UNSET : row * 1_000_003,
                micros,
                ttl);
    }

    private static UUID timeuuid(long micros, long random) {
        long time = micros * 10 + UUID_EPOCH;
        long high = time << 32 | (time >>> 16 & 0xFFFF0000L) | 0x1000 | time >>> 48 & 0xFFF;
        return new UUID(high, random & 0x3FFF_FFFF_FFFF_FFFFL | 0x8000_0000_0000_0000L);
    }
}
